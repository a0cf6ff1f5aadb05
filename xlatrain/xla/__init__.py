"""XLA: passes over jaxprs, compiler options, the compilation cache, a program's first run."""
