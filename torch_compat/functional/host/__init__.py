"""What a captured step does with values of the host: counters, draws, calls that are made after it, results that come later."""
