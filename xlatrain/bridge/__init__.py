"""From a PyTorch step to a JAX function: PyTorch captures, JAX lowers. The only part of ``xlatrain`` that imports torch."""
