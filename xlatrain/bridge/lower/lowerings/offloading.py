"""Transfers between a device and the memory of its host, inside of a program."""

from __future__ import annotations

import jax

import xlatrain.bridge.capture.offloading  # noqa: F401  defines the ops
from xlatrain.bridge.lower.registry import lowers


@lowers("xlatrain.to_host.default")
def to_host(x: jax.Array) -> jax.Array:
    """``x`` in host memory. Only :func:`to_device` can take it. XLA:CPU, whose devices compute in host memory, drops both."""
    return jax.device_put(x, jax.memory.Space.Host)


@lowers("xlatrain.to_device.default")
def to_device(x: jax.Array) -> jax.Array:
    """``x``, of :func:`to_host`, on the device."""
    return jax.device_put(x, jax.memory.Space.Device)
