"""The host side of a captured step: counters, draws, calls that are made after it, results that come later."""
