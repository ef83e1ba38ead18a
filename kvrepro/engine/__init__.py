"""Which tokens stay in a KV cache, and what that costs. It knows nothing of items, claims or files.

shapes, observe      names of tensor shapes; what a policy may look at
score                scorers: position, keys, cumulative attention, windows, what was learned; large = keep
guard, quota         tokens that may not be evicted, as boolean masks; a budget split over the spans of a prompt
allocate, select     budgets per KV head; which tokens stay, given scores, with ties defined
policy, catalogue    a policy is data, and a condition with its policy a rule; the published policies in both readings
condition, allowed   when tokens leave; a condition and the generation it returns; permitted values
attention, facts     the attention function, which sees probabilities without storing them; facts about a model
cache                the ragged cache, which frees what is evicted; 4-bit storage of what survives
prefill, extend      attention of a prompt, with KVzip's repetition, and of the tokens after it
evict, shared        which tokens stay, decided in one place for all regimes; one set of tokens for all layers
passes, rows         a prompt becomes rows; rows that decode together
backend              kernels or plain PyTorch, for each condition; norms and rotations in one launch each
decode, generate     the loop; the one call: prompts x conditions -> generations
capture              a cache that stays in place, and steps captured once and replayed on a GPU
hf                   Hugging Face's own generate on an evicted cache; prefixes compressed once, kept in files
"""
