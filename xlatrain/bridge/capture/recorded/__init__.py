"""The fast path of a capture: the ops of a run are recorded, and the graph is made from the record."""
