"""Data: loaders re-batched for the mesh, the global order of samples, and positions that can be found again."""
