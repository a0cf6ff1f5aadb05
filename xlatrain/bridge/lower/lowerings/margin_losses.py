"""The margin losses that PyTorch does not decompose, or, in the forward of the multilabel one, decomposes wrongly (2.13)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xlatrain.bridge.lower.registry import lowers

_NONE, _MEAN = 0, 1


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(1, -1) if x.ndim < 2 else x


def _per_row(grad: jax.Array, rows: int, reduction: int) -> jax.Array:
    """The gradient of each row's loss, shape (rows, 1)."""
    if reduction == _NONE:
        return grad.reshape(rows, 1)
    return jnp.broadcast_to(grad / rows if reduction == _MEAN else grad, (rows, 1))


@lowers("aten.multi_margin_loss_backward.default")
def multi_margin_loss_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: float,
    margin: float,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiMarginLoss.html"""
    scores, labels = _rows(x), target.reshape(-1, 1)
    is_target = jnp.arange(scores.shape[1]) == labels
    violation = margin - jnp.sum(jnp.where(is_target, scores, 0), axis=1, keepdims=True) + scores
    slope = jnp.where((violation > 0) & ~is_target, 1.0 if p == 1 else 2 * violation, 0) / scores.shape[1]
    if weight is not None:
        slope = slope * jnp.take(weight, labels)
    slope = jnp.where(is_target, -jnp.sum(slope, axis=1, keepdims=True), slope)
    return (_per_row(grad, scores.shape[0], reduction) * slope).reshape(x.shape)


def _violations(scores: jax.Array, labels: jax.Array, others: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The margin violations (rows, labels, classes), and which labels are valid: bool (rows, labels).

    A violation is ``1 - score of the label + score of the class`` where it counts and is positive. A row's labels end at the
    first negative one, and only classes that are no label (``others``) count.
    """
    valid = jnp.cumprod(labels >= 0, axis=1).astype(bool)
    at_label = jnp.take_along_axis(scores, jnp.where(valid, labels, 0), axis=1)
    excess = 1 - at_label[:, :, None] + scores[:, None, :]
    return jnp.where((excess > 0) & valid[:, :, None] & others[:, None, :], excess, 0), valid


@lowers("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss_forward(x: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    """The loss, and which classes are labels (0 or 1).

    https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiLabelMarginLoss.html
    """
    scores, labels = _rows(x), _rows(target)
    classes = scores.shape[1]
    valid = jnp.cumprod(labels >= 0, axis=1).astype(bool)
    is_target = jnp.any((labels[:, :, None] == jnp.arange(classes)) & valid[:, :, None], axis=1)
    excess, _ = _violations(scores, labels, ~is_target)
    loss = jnp.sum(excess, axis=(1, 2)) / classes
    if reduction != _NONE:
        loss = jnp.mean(loss) if reduction == _MEAN else jnp.sum(loss)
    return (loss.reshape(x.shape[:-1]) if reduction == _NONE else loss), is_target.reshape(target.shape).astype(x.dtype)


@lowers("aten.multilabel_margin_loss_backward.default")
def multilabel_margin_loss_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    scores, labels = _rows(x), _rows(target)
    rows, classes = scores.shape
    excess, valid = _violations(scores, labels, ~_rows(is_target).astype(bool))
    violated = excess > 0
    per_label = jnp.sum(violated, axis=2)
    hot = (labels[:, :, None] == jnp.arange(classes)) & valid[:, :, None]
    slope = jnp.sum(violated, axis=1) - jnp.sum(jnp.where(hot, per_label[:, :, None], 0), axis=1)
    return (_per_row(grad, rows, reduction) * slope.astype(x.dtype) / classes).reshape(x.shape)
