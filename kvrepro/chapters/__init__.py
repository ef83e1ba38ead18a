"""What is particular to one source: its conditions and contrasts. No chapter knows another.

protection, reanalysis    Protection Is (Nearly) All You Need; that paper's own rows
fragility                 DefensiveKV
dropkv_bound              DropKV
leakage                   Pitfalls of KV cache compression
reclamation               the engineering guide to eviction and compaction
synthesis                 one grid over scorer, guard, split, regime and budget
"""
