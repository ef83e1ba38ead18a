"""The chapter on the bound of DropKV: its theory on real attention, its guarantee against the truth, its answers."""
