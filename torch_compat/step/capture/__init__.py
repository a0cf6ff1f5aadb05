"""The capture of a user's step: its Python runs once, on fake tensors."""
