"""Reading elements by index tensors.

An index out of range is an error in torch and cannot be one inside an XLA program: reads of floats give NaN there (the dtype's
minimum for integers), so that the mistake shows, and writes are dropped. Where torch does not count negative indices from the
end (labels and tokens of -1 in ``cross_entropy``, ``nn.Embedding``), they are out of range, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from xlatrain.bridge.errors import LoweringError
from xlatrain.bridge.lower.operands import along, canonical_dim
from xlatrain.bridge.lower.registry import lowers

Indices = Sequence[jax.Array | None]


def index_tuple(indices: Indices) -> tuple[jax.Array | slice, ...]:
    """torch's index list as a JAX index: None keeps a dim whole.

    Raises:
        LoweringError: a boolean mask, whose result has a shape that depends on the data.
    """
    for index in indices:
        if index is not None and index.dtype in (np.bool_, np.uint8):
            raise LoweringError(
                "indexing by a boolean mask gives a shape that depends on the data, and XLA needs static shapes; "
                "use torch.where or masked_fill with the mask instead"
            )
    return tuple(slice(None) if index is None else index for index in indices)


@lowers("aten.index.Tensor")
def index(x: jax.Array, indices: Indices) -> jax.Array:
    """Negative indices count from the end."""
    return x.at[index_tuple(indices)].get(mode="fill")


@lowers("aten.index_select.default")
def index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if x.ndim == 0:
        return x
    at = (*(slice(None),) * canonical_dim(dim, x.ndim), index.reshape(-1))
    return x.at[at].get(mode="fill", wrap_negative_indices=False)


@lowers("aten.embedding.default")
def embedding(
    weight: jax.Array, indices: jax.Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> jax.Array:
    """The three options only concern the gradient, which the captured graph holds in other ops."""
    del padding_idx, scale_grad_by_freq, sparse
    return weight.at[indices].get(mode="fill", wrap_negative_indices=False)


@lowers("aten.gather.default")
def gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    """``index`` may be smaller than ``x`` in other dims: its leading part is read. ``sparse_grad`` concerns the gradient."""
    del sparse_grad
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    wide, axis = along(x, dim)
    places = index.reshape(1) if index.ndim == 0 else index
    part = wide[tuple(slice(None) if d == axis else slice(size) for d, size in enumerate(places.shape))]
    inside = jnp.where(places < 0, wide.shape[axis], places)  # JAX would count negative ones from the end
    return jnp.take_along_axis(part, inside, axis=axis, mode="fill").reshape(index.shape)


@lowers("aten.nonzero_static.default")
def nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """Coordinates of the first ``size`` non-zero elements, padded by ``fill_value``: (size, x.ndim)."""
    if x.ndim == 0:
        return jnp.zeros((size, 0), jnp.int32)
    if x.size == 0:
        return jnp.full((size, x.ndim), fill_value, jnp.int32)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=-1)


@lowers("aten.repeat_interleave.Tensor")
def repeat_interleave_indices(repeats: jax.Array, *, output_size: int | None = None) -> jax.Array:
    """Index i, ``repeats[i]`` times.

    Raises:
        LoweringError: without ``output_size``: the length of the result depends on the data.
    """
    if output_size is None:
        raise LoweringError(
            "repeat_interleave with a tensor of repeats gives a length that depends on the data, and XLA needs static shapes; "
            "pass output_size=, or an int for repeats"
        )
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=output_size)
