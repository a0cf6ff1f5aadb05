"""The values of recorded tensors: by one compiled program each, or on the host."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.utils._pytree as pytree
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge import random
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.jax_value import value_of
from xlatrain.bridge.lazy_init.slices import Slice
from xlatrain.bridge.lazy_init.tape import Constant, Node, Operand, is_place, with_values
from xlatrain.bridge.lazy_init.trunc_normal import TRUNC_NORMAL
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.lower.prng import DRAWS_PER_KEY, KeyPerOp
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy, from_numpy

_log = logging.getLogger(__name__)
_SMALL = 1 << 20
"""Bytes up to which a tensor is computed by torch itself, without compiling; what is random in it, and not of torch's own
sequence, is drawn by torch's generator, seeded for that draw alone. It depends on the tensor only, so that values do not depend
on the mesh."""

Initialize = Callable[[np.ndarray, Sequence[Any]], jax.Array]
"""``(keys, inputs) -> values``; keys is uint32[draws, 2], inputs are the constants and the small draws."""


class Born(NamedTuple):
    """The values of a recorded tensor.

    Attributes:
        values: on their shards, or a host tensor where no program is needed (or possible). That may be lazy, and is not to be
            changed.
        agreed: whether every process has the same by construction. Else the values come from the process's own host code.
    """

    values: jax.Array | torch.Tensor
    agreed: bool


def born(target: Operand, sharding: Sharding | None) -> Born:
    """Make the values of a recorded tensor, on these shards (None: on the default device)."""
    with _disable_current_modes():
        piece = Slice.from_target(target)
        if piece.given is not None:
            return Born(piece.given.unread(), False)
        if any(node.draw.state is not None for node in piece.random if node.draw is not None):
            return Born(_on_host(piece), False)
        agreed = not piece.constants
        if all(storage.nbytes <= _SMALL for storage in piece.storages):
            return Born(_on_host(piece), agreed)
        if any(_is_factorization(node) for node in piece.nodes) or _is_table(piece):
            return Born(_on_host(piece), False)
        try:
            if any(_adds_up(node) for node in piece.nodes):
                values = _program(piece, _one_device())(_keys(piece), _inputs(piece))
                return Born(from_numpy(np.array(values)).to(target.geometry.dtype), True)
            return Born(_program(piece, sharding)(_keys(piece), _inputs(piece)), True)
        except BridgeError as error:
            _log.info("a tensor of shape %s is initialised on the host: %s", target.geometry.size, error)
            return Born(_on_host(piece), agreed)


def host_values(target: Operand) -> torch.Tensor:
    """The values of a recorded tensor on the host, the same as :func:`born` has; not to be changed."""
    with _disable_current_modes():
        values = born(target, _one_device()).values
        if isinstance(values, torch.Tensor):
            return with_values(values).to(target.geometry.dtype)
        return from_numpy(np.array(values)).to(target.geometry.dtype)


def _one_device() -> Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _keys(piece: Slice) -> np.ndarray:
    """The keys of the slice's draws, uint32 (draws, 2)."""
    keys = [node.draw.key() for node in piece.random if node.draw is not None]
    return np.stack(keys) if keys else np.zeros((0, 2), np.uint32)


def _is_factorization(node: Node) -> bool:
    """Whether XLA would compute the op whole on each device: the host does it once."""
    name = _name(node)
    factorizes = name.startswith(("linalg_", "_linalg_")) and name not in _ADDING_UP
    return factorizes or name in ("geqrf", "ormqr", "orgqr", "cholesky", "svd", "qr")


_MOVING = frozenset({
    "empty_strided", "zeros", "zeros_like", "new_zeros", "zero", "ones", "ones_like", "new_ones", "full", "full_like", "new_full",
    "fill", "copy", "clone", "_to_copy", "eye", "tril", "triu", "cat", "stack", "repeat", "masked_fill", "where", "flip", "roll",
})  # fmt: skip


def _is_table(piece: Slice) -> bool:
    """Whether it is computed, of nothing random: a rotary table, a schedule. Torch does it, in the dtypes that it is written
    in: XLA would take float32 for float64, and the last bit of a frequency is a wrong angle at the end of a long table."""
    moving = _MOVING | {_JAX_VALUE}  # JAX computes it wherever it is
    return not piece.random and any(_name(node).removesuffix("_") not in moving for node in piece.nodes)


_JAX_VALUE = "xlatrain::jax_value"


_ADDING_UP = frozenset({
    "sum", "nansum", "mean", "prod", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "norm_except_dim",
    "_weight_norm", "_weight_norm_interface", "logsumexp", "_softmax", "_safe_softmax", "_log_softmax", "cumsum", "cumprod",
    "logcumsumexp", "trace", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "convolution", "_fft_r2c",
    "_fft_c2r", "_fft_c2c", "index_add", "index_reduce", "scatter_add", "scatter_reduce", "native_layer_norm",
    "native_group_norm", "renorm",
})  # fmt: skip


def _adds_up(node: Node) -> bool:
    """Whether the op adds numbers, whose order, and so the last bit, partitioning would change: one device computes it."""
    name = _name(node)
    return value_of(node.args[2]).adds_up if name == _JAX_VALUE else name.removesuffix("_") in _ADDING_UP


def _name(node: Node) -> str:
    return node.func._schema.name.removeprefix("aten::")


def _inputs(piece: Slice) -> list[np.ndarray]:
    """The inputs of a program besides its keys, as numpy arrays that are the same on every process."""
    tensors = [constant.read() for constant in piece.constants]
    if tensors and jax.process_count() > 1:
        tensors = [from_numpy(multihost_utils.broadcast_one_to_all(as_numpy(tensor))) for tensor in tensors]
    drawn = [_drawn_small(node) for node in piece.random if _is_small(node)]
    return [as_numpy(tensor).astype(jax_dtype(tensor.dtype)) for tensor in (*tensors, *drawn)]


# -- random numbers by torch -------------------------------------------------------------------------------------------


def _is_small(node: Node) -> bool:
    """Whether torch draws the numbers: few, and depending on no other tensor."""
    if any(isinstance(leaf, Constant) for leaf in pytree.tree_leaves((node.args, node.kwargs), is_leaf=is_place)):
        return False
    if node.func is TRUNC_NORMAL:
        return True  # no program draws so: it was recorded when the numbers were to be torch's
    if node.overwrites is not None:
        return node.overwrites.nbytes <= _SMALL and len(node.reads) == 1
    return not node.reads and all(storage is None or storage.nbytes <= _SMALL for storage in node.outputs)


def _drawn_small(node: Node) -> torch.Tensor:
    """The result of a random op that :func:`_is_small`."""
    assert node.draw is not None
    args = node.args
    if _writes(node):
        geometry = node.args[0].geometry
        args = (torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype), *args[1:])
    with _generator_at(torch.Generator().manual_seed(int(node.draw.key().view(np.uint64)[0])).get_state()):
        return node.func(*args, **node.kwargs)


@contextlib.contextmanager
def _generator_at(state: torch.Tensor) -> Iterator[None]:
    """Within the block torch's generator goes on from ``state``."""
    generator = torch.default_generator
    kept = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(kept)


def _put_small(node: Node, args: Any, values: torch.Tensor) -> torch.Tensor:
    return args[0].copy_(values) if _writes(node) else values


def _writes(node: Node) -> bool:
    return bool(node.args) and isinstance(node.args[0], Operand)


# -- compiled ----------------------------------------------------------------------------------------------------------

_LOWERED: dict[Hashable, Initialize | BridgeError] = {}


def _program(piece: Slice, sharding: Sharding | None) -> Initialize:
    """The program for slices of this signature.

    Raises:
        BridgeError: an op cannot be captured or has no lowering.
    """
    key = (piece.signature, jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]
    if key not in _LOWERED:
        try:
            _LOWERED[key] = _lower(piece)
        except BridgeError as error:
            _LOWERED[key] = error
    lowered = _LOWERED[key]
    if isinstance(lowered, BridgeError):
        raise lowered
    return _compiled(lowered, sharding)


@functools.lru_cache(maxsize=4096)
def _compiled(initialize: Initialize, sharding: Sharding | None) -> Initialize:
    # without compiler_options: run once; initializers draw, and hardly compute
    return jax.jit(initialize, out_shardings=sharding)


def _lower(piece: Slice) -> Initialize:
    count = len(piece.constants)
    small = [number for number, node in enumerate(piece.random) if _is_small(node)]

    def recorded(*inputs: torch.Tensor) -> torch.Tensor:
        drawn = dict(zip(small, inputs[count:], strict=True))

        def draw(number: int, node: Node, args: Any, kwargs: Any) -> Any:
            if number in drawn:
                return _put_small(node, args, drawn[number])
            random.continue_at(number * DRAWS_PER_KEY)
            return node.func(*args, **kwargs)

        return piece.replay(inputs[:count], draw)

    drawn = [_drawn_small(piece.random[number]) for number in small]
    run = lower(capture(recorded, *(constant.tensor.detach() for constant in piece.constants), *drawn))

    def initialize(keys: np.ndarray, inputs: Sequence[Any]) -> jax.Array:
        (values,) = run(inputs, KeyPerOp(keys))
        return values

    return initialize


# -- on the host -------------------------------------------------------------------------------------------------------


def _on_host(piece: Slice) -> torch.Tensor:
    """Computed by torch, op by op; random numbers are torch's, or those of a program, as of any other tensor that shares them."""

    def draw(number: int, node: Node, args: Any, kwargs: Any) -> Any:
        if node.draw is not None and node.draw.state is not None:
            node.draw.is_seen = True
            with _generator_at(node.draw.state):
                return node.func(*args, **kwargs)
        return _put_small(node, args, _drawn_small(node)) if _is_small(node) else _drawn_alone(node, args, kwargs)

    return piece.replay([constant.read() for constant in piece.constants], draw)


_ALONE: dict[Hashable, tuple[Capture, Callable[..., list[jax.Array]]]] = {}


def _drawn_alone(node: Node, args: Any, kwargs: Any) -> Any:
    """Run a random op alone, on host tensors, with the numbers that it would draw inside a larger program."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    assert node.draw is not None
    tensors = [leaves[place].detach() for place in places]
    key = (
        node.func,
        repr([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]),
        tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors),
    )
    if key not in _ALONE:
        _ALONE[key] = _lower_alone(node, leaves, spec, places, tensors)
    captured, run = _ALONE[key]
    arrays = run([as_numpy(tensor).astype(jax_dtype(tensor.dtype)) for tensor in tensors], KeyPerOp(node.draw.key()[None]))
    drawn = [from_numpy(np.array(one)).to(spec.dtype) for one, spec in zip(arrays, captured.outputs, strict=True)]
    result = captured.unflatten(drawn)
    writes = [a for a in node.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return args[0].copy_(result) if writes else result


def _lower_alone(
    node: Node, leaves: list[Any], spec: Any, places: list[int], tensors: list[torch.Tensor]
) -> tuple[Capture, Callable[..., list[jax.Array]]]:
    """The capture of one random op over ``tensors``, whose positions among ``leaves`` are ``places``, and its jitted function."""

    def alone(*tensors: torch.Tensor) -> Any:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor.clone()
        args, kwargs = pytree.tree_unflatten(given, spec)
        random.continue_at(0)
        return node.func(*args, **kwargs)

    captured = capture(alone, *tensors)
    return captured, jax.jit(lower(captured))  # without compiler_options: one op of an initializer
