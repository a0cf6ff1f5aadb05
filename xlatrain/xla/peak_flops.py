"""Peak throughput of accelerators, for model FLOPs utilisation."""

from __future__ import annotations

from typing import Any

# Dense matrix FLOP/s in bfloat16 (float16 where a chip lacks it) of one JAX device, from the vendors' data sheets. A JAX device
# of TPU v2, v3 and 7x is half a chip. The first name that the device kind begins with counts.
_PEAK_BF16 = (
    ("TPU v2", 22.5e12),
    ("TPU v3", 61.5e12),
    ("TPU v4 lite", 137.5e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
    ("TPU7x", 1153.5e12),
    ("NVIDIA B200", 2250e12),
    ("NVIDIA H200", 989.5e12),
    ("NVIDIA H100 NVL", 835.5e12),
    ("NVIDIA H100 PCIe", 756.5e12),
    ("NVIDIA H100", 989.5e12),
    ("NVIDIA A100", 312e12),
    ("NVIDIA A10G", 70e12),
    ("NVIDIA A10", 125e12),
    ("NVIDIA L40S", 362e12),
    ("NVIDIA L4", 121e12),
    ("Tesla T4", 65e12),
    ("Tesla V100", 125e12),
)
_HALF = ("bfloat16", "float16")
# Kinds whose data sheet says twice as much for these dtypes. Elsewhere they are computed in 16 bits, or nothing is said.
_TWICE = {
    "int8": ("TPU v5", "TPU v6", "NVIDIA", "Tesla T4"),
    "float8_e4m3fn": ("TPU7x", "NVIDIA B200", "NVIDIA H200", "NVIDIA H100", "NVIDIA L40S", "NVIDIA L4"),
}


def peak_flops(device: Any, dtype: str) -> float | None:
    """Peak dense matrix FLOP/s of one JAX device, or None if it is not known.

    Args:
        device: a ``jax.Device``; its ``device_kind`` is looked up.
        dtype: what the matrices are multiplied in: 16 or 8 bits, for which the data sheets have numbers; others give None.
    """
    if dtype not in _HALF and dtype not in _TWICE:
        return None
    times = 2 if device.device_kind.startswith(_TWICE.get(dtype, ())) else 1
    return next((times * flops for kind, flops in _PEAK_BF16 if device.device_kind.startswith(kind)), None)
