"""FLOPs of a program before XLA changes it: the matrix products and convolutions of its jaxpr.

XLA's own count takes a loop's body once; here it is multiplied by the loop's length. Element-wise work is left out, as in the
usual definition of model FLOPs utilisation. Recomputed layers count as often as they are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


@dataclass(frozen=True)
class Flops:
    """The FLOPs of one step, on all devices.

    Attributes:
        total: floating-point operations; a multiply-add is two.
        bf16_passes: the same weighted with the passes that a TPU's bfloat16 matrix unit makes for each: 1 for 16-bit operands and
            float32 ones at default precision, 3 at ``high``, 6 at ``highest``.
        int8, float8: how many of them multiply values of eight bits, which some chips do faster.
    """

    total: int
    bf16_passes: int
    int8: int = 0
    float8: int = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.total + other.total,
            self.bf16_passes + other.bf16_passes,
            self.int8 + other.int8,
            self.float8 + other.float8,
        )

    def __mul__(self, times: int) -> Flops:
        return Flops(self.total * times, self.bf16_passes * times, self.int8 * times, self.float8 * times)


def count(jaxpr: Any) -> Flops:
    """The FLOPs of a (closed) jaxpr. A ``while`` whose trip count is not known counts once, a ``cond`` as its dearest branch."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    total = Flops(0, 0)
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _PRODUCTS:
            total += _product(equation)
        elif name == "pallas_call":
            continue  # who calls a kernel says what it computes
        elif name == "cond":
            total += max((count(branch) for branch in equation.params["branches"]), key=lambda found: found.total)
        else:
            times = int(equation.params["length"]) if name == "scan" else 1
            if name == "shard_map":  # its operands are parts over the axes that it takes; over others they are whole
                taken = equation.params.get("newly_manual_axes", equation.params.get("manual_axes", ()))
                times = math.prod(equation.params["mesh"].shape[axis] for axis in taken)
            for inner in core.jaxprs_in_params(equation.params):
                total += count(inner) * times
    return total


def _product(equation: Any) -> Flops:
    left, right = (variable.aval for variable in equation.invars[:2])
    out = equation.outvars[0].aval
    if equation.primitive.name == "conv_general_dilated":
        numbers = equation.params["dimension_numbers"]
        kernel = math.prod(right.shape) // right.shape[numbers.rhs_spec[0]]  # input channels of a group × window
        flops = 2 * math.prod(out.shape) * kernel
        window = equation.params["lhs_dilation"]
        flops //= math.prod(window)  # zeros between the elements of the input are not multiplied
    elif equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        flops = 2 * math.prod(out.shape) * math.prod(left.shape[dim] for dim in contracted)
    else:  # each row meets one group's matrix; where rows are summed, each group has a matrix of its own rows
        dims = equation.params["ragged_dot_dimension_numbers"]
        (contracted, _), _ = dims.dot_dimension_numbers
        summed = dims.lhs_ragged_dimensions[0] in contracted
        flops = 2 * math.prod(out.shape[1:] if summed else out.shape) * math.prod(left.shape[dim] for dim in contracted)
    narrow = {left.dtype, right.dtype}
    return Flops(
        flops,
        flops * _passes(left.dtype, equation.params.get("precision")),
        int8=flops if all(dtype == np.int8 for dtype in narrow) else 0,
        float8=flops if all(str(dtype).startswith("float8") for dtype in narrow) else 0,
    )


def _passes(dtype: Any, precision: Any) -> int:
    if np.dtype(dtype).itemsize < 4:
        return 1
    first = precision[0] if isinstance(precision, tuple) else precision
    return {jax.lax.Precision.HIGHEST: 6, jax.lax.Precision.HIGH: 3}.get(first, 1)  # pyright: ignore[reportArgumentType]
