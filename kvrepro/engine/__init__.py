"""Which tokens stay in a KV cache, and what that costs. It knows nothing of items, claims or files.

shapes, observe      names of tensor shapes; what a policy may look at; places: what depends on positions alone
score                scorers: position, keys, cumulative attention, windows, what was learned; large = keep
guard, quota         tokens that may not be evicted, as boolean masks; a budget split over the spans of a prompt
allocate, select     budgets per KV head; which tokens stay, given scores, with ties defined
policy, catalogue    a policy is data; the published policies in both readings
rule                 a condition with its policy and parameters, or why there cannot be one
regime, condition    when tokens leave; a condition and the generation it returns; allowed: permitted values
attention, facts     the attention function, which sees probabilities without storing them; facts about a model
usable               whether the engine can drive a model: its logits against the model's own, once
cache, quantise      the ragged cache, which frees what is evicted; 4-bit storage of what survives
prefill, extend      attention of a prompt, and of the tokens after it; signals: what each token received
evict, shared        which tokens stay, decided in one place for all regimes; one set of tokens for all layers
passes, rows         a prompt becomes rows; rows that decode together; repeat: KVzip's repetition
backend              kernels or plain PyTorch, for each condition; norms and rotations in one launch each
decode, generate     the loop; the one call: prompts x conditions -> generations; memory: what a batch may take
fixed, capture       a cache that stays in place; steps captured once and replayed on a GPU
evicting, prefix     Hugging Face's own generate on an evicted cache; prefixes compressed once, kept in files
"""
