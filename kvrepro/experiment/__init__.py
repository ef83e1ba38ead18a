"""Items x conditions -> rows -> verdicts.

data, models         items by name, which fit a model; public files; checkpoints: embedded, local, on the hub
jsonl, prompt        rows of files; messages as token ids, LongBench's forms
artifact             the protection paper's rows
run, answers         the one runner of studies, and answers that no policy gives; rows of what a model says
pool                 who computes: this process, processes of this machine, Ray
settings             how studies are run, and what a notebook may set; checked before anything is loaded
store                rows that survive a crash; what a row depends on
measure, stats       scores of answers; intervals and tests
claims, members      what papers say; what each claim is tested on, in one language
judge                claims and members -> verdicts
verdict, figure      verdicts and findings in a notebook; what all figures share
provenance           where a page's numbers come from
"""
