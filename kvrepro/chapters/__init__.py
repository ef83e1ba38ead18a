"""What is particular to one source: its conditions, contrasts and figures."""
