"""Items x conditions -> rows -> verdicts."""
