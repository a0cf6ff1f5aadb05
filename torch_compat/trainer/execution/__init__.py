"""Execution of steps: compiled over the mesh, or eagerly where that is impossible."""
