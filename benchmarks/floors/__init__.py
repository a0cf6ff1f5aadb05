"""The same maths as the benchmark models, written by hand in JAX with optax: what a compiled step is measured against."""
