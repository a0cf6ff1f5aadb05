"""Ops on arrays that are larger than torch's tensors: the beginning of each dim is the tensor, the rest has any values."""
