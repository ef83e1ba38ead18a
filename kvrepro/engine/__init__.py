"""Which tokens stay in a KV cache, and what that costs. It knows nothing of items, claims or files.

shapes, observe      names of tensor shapes; what a policy may look at
score                scorers: position, keys, cumulative attention, windows, what was learned; large = keep
allocate             guards, quotas over a prompt's spans, budgets per KV head; which tokens stay, with ties defined
policy, catalogue    a policy is data, and a condition with its policy a rule; the published policies in both readings
condition            permitted values; when tokens leave; a condition and the generation it returns
attention, facts     the attention function, which sees probabilities without storing them; facts about a model
cache                the ragged cache, which frees what is evicted; 4-bit storage of what survives
prefill              attention of a prompt, with KVzip's repetition
evict, shared        which tokens stay, decided in one place for all regimes; one set of tokens for all layers
rows, batches        a row for each prompt and condition, with its cache; which rows are computed together
backend              kernels or plain PyTorch, for each condition; norms and rotations in one launch each
decode, generate     the loop, with steps captured once and replayed on a GPU; the one call: prompts x conditions
hf                   Hugging Face's own generate on an evicted cache; prefixes compressed once, kept in files
"""
