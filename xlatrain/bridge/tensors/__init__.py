"""torch tensors whose values are elsewhere: on a mesh, on the host, or nowhere yet."""
