"""Tensors with as many rows as a mask has True elements, of which no program knows the number: ``x[mask]``, packed sequences.

:mod:`.masked_rows` is the tensor, :mod:`.functions`,
:mod:`.by_index` and :mod:`.reductions` what torch's functions do with it, :mod:`.made` where user code gets one.
"""
