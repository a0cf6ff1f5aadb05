"""A captured graph → a JAX function."""
