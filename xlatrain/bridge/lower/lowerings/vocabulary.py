"""Losses over a large vocabulary, a stretch of the vocabulary at a time: logits are never whole.

Shapes: rows (…), D features, V words. A stretch of logits is what torch multiplies, rounded as torch rounds it, then in float32.
Its largest number and the sum of its exponentials are carried on (Milakov & Gimelshein 2018). The backward pass makes each
stretch again, and of it the gradient by the stretch's weights at once; those by x are summed in float32.

The weights are gathered whole, as a product of its own would gather them, once for both passes, and their gradient leaves split
over ``fsdp``. On a mesh with a ``tensor`` axis, which splits the vocabulary, there is one stretch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlatrain.bridge.capture.vocabulary import largest
from xlatrain.bridge.lower.registry import lowers, program_mesh
from xlatrain.mesh.mesh import SEQUENCE_AXIS, batch_axes, data_parallel_size, sequence_parts

_LANES, _SUBLANES = 128, 8


@dataclass(frozen=True)
class _Stretches:
    """The stretches of a vocabulary, and the places of its words in them.

    The words of each part, which a device holds, stand one after the other, and behind them places without a word: parts are
    filled up to whole tiles of the chip, so that stretches are cut from what is gathered, where XLA would copy all of it.

    Attributes:
        count: of them.
        words: of all.
        part: words of a part.
        filled: places of a part.
    """

    count: int
    words: int
    part: int
    filled: int

    @classmethod
    def of(cls, rows: int, words: int, limit: int, parts: int = 1) -> _Stretches:
        """Stretches of about ``limit`` logits at most, of whole lanes: few, or up to twice as many where less is filled up.

        Args:
            parts: into which devices split the words; one where that does not divide them.
        """
        part = words // parts if words % parts == 0 else words
        most = -(-words // _LANES)
        least = min(-(-rows * words // max(limit, 1)), most)
        if least <= 1:
            return cls(1, words, part, part)
        filled = {
            n: -(-part // size) * size for n in range(least, min(2 * least, most) + 1) for size in [_whole(n, words // part)]
        }
        count = min(filled, key=lambda n: filled[n])
        return cls(count, words, part, filled[count])

    @property
    def parts(self) -> int:
        """The number of parts."""
        return self.words // self.part

    @property
    def size(self) -> int:
        """Places of each stretch."""
        return self.parts * self.filled // self.count

    @property
    def has_gaps(self) -> bool:
        """Whether there are places without a word."""
        return self.filled > self.part

    def fill(self, x: jax.Array) -> jax.Array:
        """(V, …) → (parts, places of each, …), zeros where there is no word; as it is where there are no such places."""
        if not self.has_gaps:
            return x
        parts = x.reshape(self.parts, self.part, *x.shape[1:])
        return jnp.pad(parts, [(0, 0), (0, self.filled - self.part), *[(0, 0)] * (x.ndim - 1)])

    def cut(self, x: jax.Array) -> jax.Array:
        """The result of :meth:`fill` → (count, size, …)."""
        return x.reshape(self.count, self.size, *x.shape[1 + self.has_gaps :])

    def joined(self, x: jax.Array) -> jax.Array:
        """(count, size, …) → (V, …)."""
        return x.reshape(self.parts, self.filled, *x.shape[2:])[:, : self.part].reshape(self.words, *x.shape[2:])

    def place(self, word: jax.Array) -> jax.Array:
        """Where words stand."""
        return word // self.part * self.filled + word % self.part if self.has_gaps else word

    def is_word(self, place: jax.Array) -> jax.Array:
        """Whether a word stands at each of some places."""
        return place % self.filled < self.part


def _whole(count: int, parts: int) -> int:
    """The number of places that parts are filled up to multiples of, so that all are ``count`` stretches of whole lanes."""
    lanes = count * _LANES // math.gcd(count * _LANES, parts)
    return lanes if parts == 1 else math.lcm(_SUBLANES, lanes)


@dataclass(frozen=True)
class _Places:
    """The places of a loss's arrays on a mesh; None: as the partitioner likes."""

    mesh: Mesh | None
    parts: int

    @classmethod
    def of(cls, x: jax.Array) -> _Places:
        mesh = program_mesh()
        if mesh is None or mesh.size == 1 or any(mesh.shape.get(axis, 1) > 1 for axis in ("tensor", "stage")):
            return cls(None, 1)
        rows, length = data_parallel_size(mesh), sequence_parts(mesh)
        if x.shape[0] % rows or (length > 1 and (x.ndim < 3 or x.shape[1] % length)):
            return cls(None, 1)
        return cls(mesh, rows * length)

    def rows(self, x: jax.Array) -> jax.Array:
        """Dim 0 over the batch axes, dim 1 over the sequence axis where there is one, the others whole."""
        if self.mesh is None:
            return x
        split: list[Any] = [batch_axes(self.mesh) or None]
        if sequence_parts(self.mesh) > 1:
            split.append(SEQUENCE_AXIS)
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*split)))

    @property
    def word_parts(self) -> int:
        """Into how many parts parameters are split, which are gathered."""
        return 1 if self.mesh is None else self.mesh.shape.get("fsdp", 1)

    def words(self, x: jax.Array) -> jax.Array:
        """Dim 0, of words or their parts, over ``fsdp``."""
        if self.word_parts == 1:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(cast(Mesh, self.mesh), PartitionSpec("fsdp")))

    def whole(self, x: jax.Array) -> jax.Array:
        return x if self.mesh is None else lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec()))

    def gradient(self, x: jax.Array) -> jax.Array:
        """(words, D): D over ``fsdp``, if that divides it."""
        if self.word_parts == 1 or x.shape[1] % self.word_parts:
            return x
        return lax.with_sharding_constraint(x, NamedSharding(cast(Mesh, self.mesh), PartitionSpec(None, "fsdp")))


@dataclass(frozen=True)
class _Loss:
    """The operands of a loss, cut into stretches.

    Attributes:
        x: (…, D).
        labels: int32 (…), words.
        weight, bias: (count, size, D), (count, size) or None.
    """

    x: jax.Array
    labels: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    stretches: _Stretches
    places: _Places

    @classmethod
    def of(cls, x: jax.Array, weight: jax.Array, bias: jax.Array | None, index: jax.Array) -> _Loss:
        places = _Places.of(x)
        rows = math.prod(x.shape[:-1])
        one = places.mesh is None and _is_split(program_mesh())
        limit = rows * weight.shape[0] if one else largest()
        stretches = _Stretches.of(-(-rows // places.parts), weight.shape[0], limit, places.word_parts)
        labels = places.rows(index.reshape(x.shape[:-1]))
        weight = stretches.fill(weight)
        if stretches.has_gaps:
            weight = lax.optimization_barrier(places.words(weight))  # filled up where it lies; XLA would sum, not gather
        whole = places.whole(weight) if stretches.count > 1 else weight
        cut = None if bias is None else stretches.cut(stretches.fill(bias))
        return cls(places.rows(x), labels, stretches.cut(whole), cut, stretches, places)

    def logits(self, weight: jax.Array, bias: jax.Array | None, first: Any) -> jax.Array:
        """(…, size), float32; -inf where there is no word."""
        found = jnp.einsum("...d,vd->...v", self.x, weight, preferred_element_type=jnp.float32)
        if bias is not None:
            found = found + bias.astype(jnp.float32)
        found = self.places.rows(found.astype(self.x.dtype).astype(jnp.float32))
        if not self.stretches.has_gaps:
            return found
        return jnp.where(self.stretches.is_word(first + jnp.arange(self.stretches.size)), found, -jnp.inf)

    def is_label(self, first: Any) -> jax.Array:
        """(…, size): which word of a stretch is the label."""
        places = first + jnp.arange(self.stretches.size, dtype=self.labels.dtype)
        return self.stretches.place(self.labels)[..., None] == places

    @property
    def has_word(self) -> jax.Array:
        """(…): whether there is a word of the label's number."""
        return (self.labels >= 0) & (self.labels < self.stretches.words)

    def over_stretches(self, function: Callable[..., Any], carry: Any) -> tuple[Any, Any]:
        """``function(carry, weight, bias, first) -> (carry, result)`` one stretch after the other; results are stacked."""
        if self.stretches.count == 1:
            carry, result = function(carry, self.weight[0], None if self.bias is None else self.bias[0], 0)
            return carry, jax.tree.map(lambda x: x[None], result)
        firsts = jnp.arange(self.stretches.count, dtype=self.labels.dtype) * self.stretches.size

        def step(carry: Any, given: Any) -> tuple[Any, Any]:
            return function(carry, *given)

        return lax.scan(step, carry, (self.weight, self.bias, firsts))

    def zeros(self, *dims: int) -> jax.Array:
        return self.places.rows(jnp.zeros((*self.labels.shape, *dims), jnp.float32))


def _is_split(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.size > 1


@lowers("xlatrain.picked_log_softmax.default")
def picked_log_softmax(x: jax.Array, weight: jax.Array, bias: jax.Array | None, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities, and log-sum-exp of all logits ``x @ weight.T + bias``; both float32, of the shape of ``index``.

    NaN where the index is that of no word.

    Args:
        x: (…, D).
        weight, bias: (V, D), (V,).
        index: of a word for each row, of any shape.
    """
    loss = _Loss.of(x, weight, bias, index)

    def step(carry: Any, weight: Any, bias: Any, first: Any) -> tuple[Any, None]:
        highest, total, picked = carry
        logits = loss.logits(weight, bias, first)
        higher = jnp.maximum(highest, jnp.max(logits, axis=-1))
        base = jnp.where(jnp.isneginf(higher), 0, higher)  # words that cannot be
        total = total * jnp.exp(highest - base) + jnp.sum(jnp.exp(logits - base[..., None]), axis=-1)
        return (higher, total, picked + jnp.sum(jnp.where(loss.is_label(first), logits, 0), axis=-1)), None

    with jax.named_scope("loss"):
        (highest, total, picked), _ = loss.over_stretches(step, (loss.zeros() - jnp.inf, loss.zeros(), loss.zeros()))
        logsumexp = highest + jnp.log(total)
        found = jnp.where(loss.has_word, picked - logsumexp, jnp.nan)
    return found.reshape(index.shape), logsumexp.reshape(index.shape)


@lowers("xlatrain.picked_log_softmax_backward.default")
def picked_log_softmax_backward(
    factor: jax.Array, x: jax.Array, weight: jax.Array, bias: jax.Array | None, index: jax.Array, logsumexp: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by x, weight and bias (of ``x``'s dtype; zeros without one), of the sum of log-probabilities times ``factor``."""
    loss = _Loss.of(x, weight, bias, index)
    factor, logsumexp = (loss.places.rows(given.reshape(loss.labels.shape)) for given in (factor, logsumexp))
    factor = jnp.where(loss.has_word, factor.astype(jnp.float32), 0)[..., None]

    def step(by_x: jax.Array, weight: Any, bias: Any, first: Any) -> tuple[jax.Array, Any]:
        probabilities = jnp.exp(loss.logits(weight, bias, first) - logsumexp[..., None])
        by_logits = (jnp.where(loss.is_label(first), factor, 0) - probabilities * factor).astype(x.dtype)
        by_logits = loss.places.rows(by_logits)
        by_x = by_x + jnp.einsum("...v,vd->...d", by_logits, weight, preferred_element_type=jnp.float32)
        by_weight = jnp.einsum("...v,...d->vd", by_logits, loss.x)
        by_bias = jnp.sum(by_logits.astype(jnp.float32).reshape(-1, by_logits.shape[-1]), axis=0).astype(x.dtype)
        return loss.places.rows(by_x), (loss.places.gradient(by_weight), by_bias)

    with jax.named_scope("loss"):
        by_x, (by_weight, by_bias) = loss.over_stretches(step, loss.zeros(x.shape[-1]))
        by_weight, by_bias = (loss.stretches.joined(found) for found in (by_weight, by_bias))
        by_weight = loss.places.gradient(by_weight)  # and not gathered to be split otherwise
    return by_x.astype(x.dtype), by_weight.astype(weight.dtype), by_bias
