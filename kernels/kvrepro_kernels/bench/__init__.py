"""Times every kernel against its floor, checks it against float64: `python -m kvrepro_kernels.bench`.

Writes data/gpu/kernels.csv (times), targets.csv (the targets and what was reached), checks.csv (errors) and
kernels.md, which the book shows. The floor is the time of the bytes that must move at the measured copy bandwidth, or
of the floating-point operations at the measured matrix rate, whichever is longer. Times are microseconds of one call,
of graph replays over rotating inputs; where a call takes milliseconds, of plain calls.
"""
