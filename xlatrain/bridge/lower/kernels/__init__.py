"""Kernels of one platform, for ops that XLA's own code computes too slowly."""
