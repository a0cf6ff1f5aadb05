"""How steps are executed: compiled over the mesh, or eagerly where that is impossible."""
