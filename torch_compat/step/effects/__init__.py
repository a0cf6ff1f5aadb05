"""Side effects of a captured step: found while it is captured, replayed with real values after each run."""
