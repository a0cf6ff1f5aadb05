"""Mixtures of experts on a mesh: ``xlatrain::experts`` of :mod:`xlatrain.bridge.capture.traceable.transformers_experts`.

Shapes: tokens T, features D, chosen experts K for each token, experts E, inner features I. Each device sorts its own tokens by
expert and multiplies them group by group (``jax.lax.ragged_dot``). The axis ``expert`` splits the experts: tokens go to the
devices that have theirs, and results come back, by all-to-all. Its buffers hold twice what a device gets on average. Where
routing is so uneven that more is left, there is another round of the same: no token is dropped, and no buffer grows. One round
is the rule.

The backward pass makes each round again. Gradients of weights are summed over the axes that split tokens: over ``fsdp`` by
reduce-scatter, so that a device gets the part that it keeps. The partitioner would sum them whole, as it does not see that the
rows of gates and values are split together. ``tensor`` splits inner features, and what it computes is summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import xlatrain.bridge.capture.traceable.transformers_experts  # noqa: F401  defines the ops
from xlatrain.bridge.capture.activations import MESHES
from xlatrain.bridge.lower.lowerings.activation import exact_gelu
from xlatrain.bridge.lower.registry import lowers, program_mesh
from xlatrain.mesh.mesh import EXPERT_AXIS, SEQUENCE_AXIS, batch_axes, sequence_parts, shard_map_here

_SLACK = 2
"""Capacity of a round's buffers, in tokens that a device gets on average."""
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": exact_gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}
_Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class _Layer:
    """Constants of a layer.

    Attributes:
        mesh: that the program runs on; None for one device.
        activation: its name.
        gated: whether ``up`` has a gate's weights before those of the values.
        transposed: whether weights are (in, out) rather than (out, in).
        tensor: parts into which the axis ``tensor`` splits inner features; 1 where it does not divide them.
    """

    mesh: Mesh | None
    activation: str
    gated: bool
    transposed: bool
    tensor: int

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else dict(self.mesh.shape).get(axis, 1)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that split tokens."""
        if self.mesh is None:
            return ()
        return (*batch_axes(self.mesh), *([SEQUENCE_AXIS] if sequence_parts(self.mesh) > 1 else []))

    def with_parts(self, up: jax.Array) -> jax.Array:
        """(E, …) → (E, parts, I, D): a gate's weights apart from the values', so that ``tensor`` may split both alike."""
        up = jnp.swapaxes(up, 1, 2) if self.transposed else up
        parts = 2 if self.gated else 1
        return up.reshape(up.shape[0], parts, up.shape[1] // parts, up.shape[2])

    def without_parts(self, up: jax.Array) -> jax.Array:
        """The inverse of :meth:`with_parts`."""
        up = up.reshape(up.shape[0], -1, up.shape[-1])
        return jnp.swapaxes(up, 1, 2) if self.transposed else up

    def down(self, down: jax.Array) -> jax.Array:
        """(E, D, I), from or to the layer's own form."""
        return jnp.swapaxes(down, 1, 2) if self.transposed else down

    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """The places of tokens' arrays, of ``up`` and of ``down`` on the mesh."""
        assert self.mesh is not None
        expert = EXPERT_AXIS if self.size(EXPERT_AXIS) > 1 else None
        tensor = "tensor" if self.tensor > 1 else None
        return PartitionSpec(self.token_axes or None), PartitionSpec(expert, None, tensor), PartitionSpec(expert, None, tensor)

    def joined(self, by_up: jax.Array) -> jax.Array:
        """(E, parts, I, D) → (E, 1, parts · I, D), unless ``tensor`` splits inner features: the rows that ``fsdp`` splits."""
        return by_up if self.tensor > 1 else by_up.reshape(by_up.shape[0], 1, -1, by_up.shape[-1])

    def scattered(self, shape: tuple[int, ...]) -> int | None:
        """The dim of a gradient of this shape that ``fsdp`` splits, as the automatic rule splits the parameter; None: no dim.

        Args:
            shape: of :meth:`joined`, (E, …, I, D), or of ``down``, (E, D, I); whole.
        """
        last = (len(shape) - 2, len(shape) - 1)
        others = {0: self.size(EXPERT_AXIS) > 1, 2: self.tensor > 1}
        in_order = (0, *(reversed(last) if self.transposed else last))
        dims = [dim for dim in in_order if not others.get(dim) and shape[dim] % self.size("fsdp") == 0]
        return max(dims, key=lambda dim: shape[dim]) if dims and self.size("fsdp") > 1 else None


def _products(layer: _Layer, rows: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows sorted by expert through their experts; zeros for rows after the last group. ``sizes``: rows of each expert."""
    activation = _ACTIVATIONS[layer.activation]
    first, *values = (lax.ragged_dot(rows, jnp.swapaxes(up[:, part], 1, 2), sizes) for part in range(up.shape[1]))
    inner = activation(first.astype(jnp.promote_types(first.dtype, jnp.float32))).astype(first.dtype)
    for one in values:
        inner = inner * one
    return lax.ragged_dot(inner, jnp.swapaxes(down, 1, 2), sizes)


def _in_order(layer: _Layer, rows: jax.Array, experts: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Rows in any order through their experts, zeros where ``experts`` names none of those that are here."""
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=up.shape[0] + 1)[:-1].astype(jnp.int32)
    return jnp.zeros_like(rows).at[order].set(_products(layer, rows[order], up, down, sizes))


def _weighted(x: jax.Array, weights: jax.Array) -> jax.Array:
    """(T, K, D) times (T, K), summed over the chosen experts."""
    return jnp.sum(x * weights[..., None], axis=1)


def _here(layer: _Layer, index: jax.Array, x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The layer of a device's own tokens where it has all experts."""
    rows = jnp.repeat(x, index.shape[1], axis=0)
    found = _in_order(layer, rows, jnp.clip(index.reshape(-1), 0, up.shape[0]), up, down)
    return _weighted(found.reshape(*index.shape, -1), weights)


@dataclass(frozen=True)
class _Rounds:
    """The rounds in which tokens go to the devices that have their experts.

    Attributes:
        order: (T·K) choices sorted by expert.
        experts: (T·K) their experts, in this order.
        starts, counts: (devices) where the choices of each device's experts begin, and how many there are.
        capacity: choices that go from one device to another in a round.
        number: of rounds, on every device the same.
    """

    order: jax.Array
    experts: jax.Array
    starts: jax.Array
    counts: jax.Array
    capacity: int
    number: jax.Array

    @classmethod
    def of(cls, layer: _Layer, index: jax.Array, each: int) -> _Rounds:
        """Rounds for a device's own tokens; inside of a ``shard_map``.

        Args:
            index: (T, K) experts of these tokens.
            each: experts of a device.
        """
        chosen, devices = index.reshape(-1), layer.size(EXPERT_AXIS)
        order = jnp.argsort(chosen, stable=True)
        counts = jnp.bincount(chosen // each, length=devices).astype(jnp.int32)
        capacity = min(chosen.size, -(-_SLACK * chosen.size // devices))
        most = lax.pmax(jnp.max(counts), layer.token_axes)
        return cls(order, chosen[order], jnp.cumsum(counts) - counts, counts, capacity, -(-most // capacity))

    def choices(self, round: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(devices, capacity): the places in :attr:`order` of what goes to each device, and whether there is anything."""
        within = round * self.capacity + jnp.arange(self.capacity, dtype=jnp.int32)
        there = within[None] < self.counts[:, None]
        return jnp.where(there, self.starts[:, None] + within[None], 0), there


def _round(
    layer: _Layer, rounds: _Rounds, round: jax.Array, x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """The part of the result (T, D) that a round gives."""
    places, there = rounds.choices(round)
    choices = rounds.order[places]
    each = up.shape[0]
    sent = jnp.where(there[..., None], x[choices // weights.shape[1]], 0)
    experts = jnp.where(there, rounds.experts[places] % each, each)
    exchange = partial(lax.all_to_all, axis_name=EXPERT_AXIS, split_axis=0, concat_axis=0, tiled=True)
    received = exchange(sent).reshape(-1, x.shape[-1])
    found = _in_order(layer, received, exchange(experts).reshape(-1), up, down)
    back = exchange(found.reshape(sent.shape))
    share = jnp.where(there, weights.reshape(-1)[choices], 0)
    dtype = jnp.promote_types(back.dtype, weights.dtype)
    return jnp.zeros(x.shape, dtype).at[choices // weights.shape[1]].add(back * share[..., None])


def _forward(layer: _Layer, index: jax.Array, x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """A device's part of the layer."""
    if layer.size(EXPERT_AXIS) == 1:
        found = _here(layer, index, x, weights, up, down)
    else:
        rounds = _Rounds.of(layer, index, up.shape[0])
        add = partial(_round, layer, rounds)

        def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return carry[0] + 1, carry[1] + add(carry[0], x, weights, up, down)

        first = jnp.zeros(x.shape, jnp.promote_types(down.dtype, weights.dtype))
        _, found = lax.while_loop(lambda carry: carry[0] < rounds.number, step, (jnp.int32(0), first))
    return lax.psum(found, "tensor") if layer.tensor > 1 else found


def _summed(layer: _Layer, grad: jax.Array, dim: int | None) -> jax.Array:
    """A device's gradient of its experts' weights, summed over all tokens; of ``dim`` its part over ``fsdp``."""
    if dim is not None:
        grad = lax.psum_scatter(grad, "fsdp", scatter_dimension=dim, tiled=True)
    done = {EXPERT_AXIS} if dim is None else {EXPERT_AXIS, "fsdp"}
    others = tuple(axis for axis in layer.token_axes if axis not in done and layer.size(axis) > 1)
    return lax.psum(grad, others) if others else grad


def _pullback(
    layer: _Layer,
    dims: tuple[int | None, int | None],
    grad: jax.Array,
    index: jax.Array,
    x: jax.Array,
    weights: jax.Array,
    up: jax.Array,
    down: jax.Array,
) -> _Arrays:
    """Gradients by a device's x and weights, and by its experts' weights: their parts over ``fsdp`` along ``dims``."""
    primals = (x, weights, up, down)
    if layer.size(EXPERT_AXIS) == 1:
        _, pull = jax.vjp(partial(_here, layer, index), *primals)
        found = pull(grad)
    else:
        rounds = _Rounds.of(layer, index, up.shape[0])

        def step(carry: tuple[jax.Array, _Arrays]) -> tuple[jax.Array, _Arrays]:
            _, pull = jax.vjp(partial(_round, layer, rounds, carry[0]), *primals)
            return carry[0] + 1, tuple(a + b for a, b in zip(carry[1], pull(grad), strict=True))

        first = tuple(map(jnp.zeros_like, primals))
        _, found = lax.while_loop(lambda carry: carry[0] < rounds.number, step, (jnp.int32(0), first))
    by_x, by_weights, by_up, by_down = found
    if layer.tensor > 1:
        by_x, by_weights = lax.psum((by_x, by_weights), "tensor")
    return by_x, by_weights, _summed(layer, layer.joined(by_up), dims[0]), _summed(layer, by_down, dims[1])


def _with_axis(spec: PartitionSpec, dim: int | None) -> PartitionSpec:
    """``spec`` with ``fsdp`` splitting ``dim``."""
    if dim is None:
        return spec
    axes = [*spec, *[None] * (dim + 1 - len(spec))]
    return PartitionSpec(*axes[:dim], "fsdp", *axes[dim + 1 :])


def _layer(inner: int, activation: str, gated: bool, transposed: bool, mesh: int) -> _Layer:
    found = program_mesh() or MESHES[mesh]
    tensor = dict(found.shape).get("tensor", 1)
    return _Layer(found if found.size > 1 else None, activation, gated, transposed, tensor if inner % tensor == 0 else 1)


@lowers("xlatrain.experts.default")
def experts(
    x: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    up: jax.Array,
    down: jax.Array,
    activation: str,
    gated: bool,
    transposed: bool,
    mesh: int,
) -> jax.Array:
    """The weighted sum of each token's experts, (T, D).

    Args:
        x: (T, D).
        index, weights: (T, K): the chosen experts of each token, and how much each counts.
        up: (E, 2·I or I, D), ``down``: (E, D, I); with ``transposed`` the last two dims the other way round.
    """
    layer = _layer(down.shape[1 if transposed else 2], activation, gated, transposed, mesh)
    args = (index, x, weights, layer.with_parts(up), layer.down(down))
    run = partial(_forward, layer)
    if layer.mesh is None:
        return run(*args)
    tokens, of_up, of_down = layer.specs()
    with jax.named_scope("experts"):
        return shard_map_here(run, layer.mesh, (tokens, tokens, tokens, of_up, of_down), tokens)(*args)


@lowers("xlatrain.experts_backward.default")
def experts_backward(
    grad: jax.Array,
    x: jax.Array,
    index: jax.Array,
    weights: jax.Array,
    up: jax.Array,
    down: jax.Array,
    activation: str,
    gated: bool,
    transposed: bool,
    mesh: int,
) -> _Arrays:
    """Gradients by x, weights, up and down; arguments as those of :func:`experts`."""
    layer = _layer(down.shape[1 if transposed else 2], activation, gated, transposed, mesh)
    args = (grad, index, x, weights, layer.with_parts(up), layer.down(down))
    *_, one, other = args
    dims = layer.scattered(jax.eval_shape(layer.joined, one).shape), layer.scattered(other.shape)
    run = partial(_pullback, layer, dims)
    if layer.mesh is None:
        by_x, by_weights, by_up, by_down = run(*args)
    else:
        tokens, of_up, of_down = layer.specs()
        by = [_with_axis(spec, dim) for spec, dim in zip((of_up, of_down), dims, strict=True)]
        with jax.named_scope("experts"):
            into = (tokens, tokens, tokens, tokens, of_up, of_down)
            by_x, by_weights, by_up, by_down = shard_map_here(run, layer.mesh, into, (tokens, tokens, *by))(*args)
    return by_x, by_weights, layer.without_parts(by_up), layer.down(by_down)
