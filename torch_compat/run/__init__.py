"""A run as its loops and its steps both see it: hooks and how they are called, states, batches, and the report of what ran."""
