"""Items x conditions -> rows -> verdicts.

data, models         items by name, which fit a model; public files; checkpoints: embedded, local, on the hub
jsonl, prompt        rows of files; messages as token ids
longbench, artifact  LongBench's sets: prompts, answer lengths, metrics; the protection paper's rows
run                  the one runner; answers, per_item, plan: a study; limit: how it is stopped
pool                 who computes: this process, processes of this machine, Ray
settings, parameters what a notebook may set; checked before anything runs
store                rows that survive a crash; what a row depends on
measure, stats       scores of answers; intervals and tests; controls: answers that no policy gives
judge, claims        claims and members -> verdicts; history: claims written late
verdict, figure      verdicts and findings in a notebook; what all figures share
provenance           where a page's numbers come from
"""
