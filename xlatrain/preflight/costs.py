"""The costs of a compiled program by region: FLOPs, traffic of memory and the compiler's cycles, loops times their trips.

What a fusion reads and writes of HBM counts, as far as it is used: of an operand that it only slices the slice, of a result that
it updates the update. Results in VMEM count nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from xlatrain.preflight.hlo_module import Array, Computation, HloModule, Instruction

REGIONS = ("attention", "products", "optimizer", "other")
_FREE = frozenset((
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "after-all", "partition-id",
    "replica-id", "opt-barrier", "async-update",
))  # fmt: skip
_COLLECTIVE = re.compile(
    "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute|collective-broadcast|send|recv"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_UNKNOWN = 1 << 60
"""Cycles: where the compiler has no estimate it writes -1 without a sign."""


@dataclass
class Costs:
    """Costs of a step on one device.

    Attributes:
        flops: region → of matrix products and convolutions; kernels say nothing of theirs.
        int8, float8: region → how many of them multiply values of eight bits.
        traffic: region → bytes read from and written to HBM.
        cycles: region → the compiler's estimate; kernels have none.
        kernels: custom kernel → how often it runs.
    """

    flops: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    cycles: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    int8: Counter[str] = field(default_factory=Counter)
    float8: Counter[str] = field(default_factory=Counter)


def costs_of(module: HloModule) -> Costs:
    """Count a program."""
    found = Costs()
    for name, computation in module.computations.items():
        runs = module.runs.get(name, 0)
        if not runs:
            continue
        for instruction in computation.values():
            if instruction.op in ("dot", "convolution"):
                _count_product(computation, instruction, runs, found)
        if name in module.scheduled:
            for instruction in computation.values():
                _count(module, computation, instruction, runs, found)
    return found


def _count_product(computation: Computation, instruction: Instruction, runs: int, found: Costs) -> None:
    region, flops = _region(instruction, True), _flops(computation, instruction) * runs
    found.flops[region] += flops
    given = [array.dtype for name in instruction.operands[:2] if name in computation for array in computation[name].arrays[:1]]
    if all(dtype == "s8" for dtype in given):
        found.int8[region] += flops
    elif all(dtype.startswith("f8") for dtype in given):
        found.float8[region] += flops


def _count(module: HloModule, computation: Computation, instruction: Instruction, runs: int, found: Costs) -> None:
    if instruction.op == "custom-call" and "tpu_custom_call" in instruction.attributes:
        found.kernels[re.sub(r"\.\d+$", "", instruction.name)] += runs
    region = _region(instruction, _multiplies(module, instruction))
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles and int(cycles[1]) < _UNKNOWN:
        found.cycles[region] += int(cycles[1]) * runs
    found.traffic[region] += int(_traffic(module, computation, instruction) * runs)


def _region(instruction: Instruction, multiplies: bool) -> str:
    path = instruction.path
    named = next((region for region in ("attention", "optimizer") if f"/{region}/" in f"{path}/"), None)
    return named or ("products" if multiplies else "other")


def _multiplies(module: HloModule, instruction: Instruction, depth: int = 0) -> bool:
    if instruction.op in ("dot", "convolution"):
        return True
    if instruction.op != "fusion" or depth > 4:
        return False
    inside = (one for name in instruction.called() for one in module.computations.get(name, {}).values())
    return any(_multiplies(module, one, depth + 1) for one in inside)


# -- traffic -----------------------------------------------------------------------------------------------------------


def _traffic(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    op = instruction.op
    if op in _FREE or op.endswith("-done"):
        return 0
    operands = [computation[name].arrays for name in instruction.operands if name in computation]
    if op in ("copy-start", "slice-start", "dynamic-slice-start"):  # gives (operands, result, …), or the result first
        moved = min(instruction.arrays[:2], key=lambda one: one.nbytes)
        return moved.nbytes * sum(one.space == 0 for one in instruction.arrays[:2])
    written = _in_hbm(instruction.arrays)
    if op in _SLICES:
        return 2 * written
    if op == "dynamic-update-slice":
        return 2 * _in_hbm(operands[1])
    if op != "fusion":
        return written + sum(map(_in_hbm, operands))
    return _of_fusion(module, instruction, operands, written)


def _of_fusion(module: HloModule, instruction: Instruction, operands: list[list[Array]], written: float) -> float:
    name = next(instruction.called(), "")
    inside = module.computations.get(name, {})
    exchanged = _exchanged(module, name)
    if exchanged:  # part of an asynchronous collective: the network's traffic is not that of memory
        written = sum(one.nbytes for one in instruction.arrays if one.space == 0 and _kind(one) not in exchanged)
    read = 0.0
    for i, arrays in enumerate(operands):
        full = _in_hbm(arrays)
        if full and not any(_kind(one) in exchanged for one in arrays):
            read += _used(module, name, i, full)
    for one in inside.values():
        ends = one.is_root or any(other.is_root and one.name in other.operands for other in inside.values())
        if one.op == "dynamic-update-slice" and ends and one.operands[1] in inside:
            full, update = _bytes(one.arrays), _bytes(inside[one.operands[1]].arrays)
            written -= full - update if written >= full else 0
    return written + read


def _exchanged(module: HloModule, name: str, depth: int = 0) -> set[tuple[str, tuple[int, ...]]]:
    """The arrays of the collectives inside of a fusion."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    inside = module.computations.get(name, {})
    for one in inside.values():
        if _COLLECTIVE.match(one.op):
            found.update(_kind(array) for array in one.arrays)
            found.update(_kind(array) for given in one.operands if given in inside for array in inside[given].arrays)
        elif one.op == "fusion" and depth < 4:
            for called in one.called():
                found |= _exchanged(module, called, depth + 1)
    return found


def _used(module: HloModule, name: str, index: int, full: float, depth: int = 0) -> float:
    """The bytes of a fusion's parameter that it reads."""
    inside = module.computations.get(name, {})
    parameter = next(
        (one for one in inside.values() if one.op == "parameter" and re.match(rf"\({index}\)", one.attributes)), None
    )
    if parameter is None:
        return full
    total, todo, seen = 0.0, [parameter.name], set[str]()
    while todo:
        given = todo.pop()
        for one in inside.values():
            if given not in one.operands or (one.name, given) in seen:
                continue
            seen.add(f"{one.name} {given}")
            if one.op in _SLICES:
                total += _bytes(one.arrays)
            elif one.op == "bitcast":
                todo.append(one.name)
            elif one.op == "fusion" and depth < 4:
                total += _used(module, next(one.called(), ""), one.operands.index(given), full, depth + 1)
            elif one.op != "dynamic-update-slice" or one.operands[0] != given:
                return full
    return min(full, total)


def _kind(array: Array) -> tuple[str, tuple[int, ...]]:
    return array.dtype, tuple(dim for dim in array.dims if dim != 1)


def _bytes(arrays: list[Array]) -> float:
    return sum(one.nbytes for one in arrays)


def _in_hbm(arrays: list[Array]) -> float:
    return sum(one.nbytes for one in arrays if one.space == 0)


# -- FLOPs -------------------------------------------------------------------------------------------------------------


def _flops(computation: Computation, instruction: Instruction) -> int:
    """A multiply-add is two."""
    if any(name not in computation for name in instruction.operands[:2]):
        return 0
    left, right = (computation[name].arrays[0].dims for name in instruction.operands[:2])
    out = instruction.arrays[0].dims
    if instruction.op == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2 * math.prod(out) * math.prod(left[dim] for dim in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0
    of_left, of_right, of_out = labels.groups()
    window = _window(instruction.attributes)
    valid = 1
    for i, dim in enumerate(sorted(label for label in of_right if label.isdigit())):
        sizes = (left[of_left.index(dim)], out[of_out.index(dim)])
        valid *= _valid(*sizes, **{key: values[i] for key, values in window.items() if i < len(values)})
    return 2 * valid * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]


def _window(attributes: str) -> dict[str, list[int]]:
    """By dim: ``size``, ``stride``, ``lhs_dilate``, ``rhs_dilate`` and ``pad``, before the first element."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in found[1].split()) if found else {}
    names = {"size", "stride", "lhs_dilate", "rhs_dilate", "pad"} & set(parts)
    return {name: [int(text.split("_")[0]) for text in parts[name].split("x")] for name in names}


def _valid(
    before: int, after: int, size: int = 1, stride: int = 1, lhs_dilate: int = 1, rhs_dilate: int = 1, pad: int = 0
) -> int:
    """Count the products along one dim that are of two elements, neither of padding nor of what dilation puts between them.

    Args:
        before, after: elements of the input and of the result.
    """
    last = (before - 1) * lhs_dilate
    places = ((k * rhs_dilate - pad, o * stride) for k in range(size) for o in range(after))
    return sum(0 <= shift + place <= last and (shift + place) % lhs_dilate == 0 for shift, place in places)
