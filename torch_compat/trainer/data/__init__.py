"""Where batches come from: loaders re-batched for the mesh, the global order of samples, and places that can be found again."""
