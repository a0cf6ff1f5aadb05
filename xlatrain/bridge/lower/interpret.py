"""Lower a captured graph to a JAX function, op by op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import Mesh
from torch.fx.node import Node, map_arg

from xlatrain.bridge.capture.capture import Capture, TensorSpec
from xlatrain.bridge.errors import BridgeError, LoweringError
from xlatrain.bridge.loops.scan import Values
from xlatrain.bridge.loops.schedule import Loop, operands_of, unrolled
from xlatrain.bridge.lower.bounded.call import BoundedCall, TrueNumbers
from xlatrain.bridge.lower.bounded.table import compute as compute_bounded
from xlatrain.bridge.lower.channels_last import channels_last, images
from xlatrain.bridge.lower.index_checks import IndexFindings
from xlatrain.bridge.lower.own_differences import own_differences, zero_of_themselves
from xlatrain.bridge.lower.prng import KeyPerOp, use_key
from xlatrain.bridge.lower.recomputation import BARRIER, Recomputation, recomputations
from xlatrain.bridge.lower.registry import lowering_of
from xlatrain.bridge.lower.registry import partitioned as partitioned_program
from xlatrain.bridge.lower.shared_operands import unexpanded
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.mesh.pipelining import Pipelining

_DEFAULTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_IDENTITIES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


class Lowered(Protocol):
    """A function of arrays, a key, and what takes the largest indices (:mod:`xlatrain.bridge.lower.index_checks`)."""

    def __call__(
        self,
        inputs: Sequence[Any],
        key: jax.Array | KeyPerOp | None,
        found: IndexFindings | None = None,
        numbers: tuple[jax.Array, jax.Array] | None = None,
        /,
    ) -> list[Any]: ...


def lower(
    capture: Capture,
    *,
    rolled: bool = False,
    platform: str | None = None,
    partitioned: bool = False,
    mesh: Mesh | None = None,
    pipelining: Pipelining | None = None,
) -> Lowered:
    """A pure JAX function that computes ``capture``'s graph, to be called under ``jax.jit``.

    Args:
        capture: what is computed.
        rolled: repeated layers run as a loop (:mod:`xlatrain.bridge.loops.rolling`). Inputs may then be
            :class:`~xlatrain.step.stacking.Row`, which spares the loop a copy, and so are outputs that a loop made.
        platform: of the devices that it will run on, for loops (:mod:`xlatrain.bridge.loops.scan`) and the order of images' dims
            (:mod:`xlatrain.bridge.lower.channels_last`); None if unknown.
        partitioned: whether the program is for several devices (:mod:`xlatrain.bridge.lower.registry`).
        mesh: those devices, for kernels that XLA does not partition itself (:mod:`xlatrain.bridge.lower.kernels`); None if
            unknown.
        pipelining: if ``rolled``, layers run on the stages of ``mesh`` (:mod:`xlatrain.bridge.loops.pipeline`).

    It takes one array per input (in order; dtype :func:`~xlatrain.bridge.tensors.dtypes.jax_dtype` of torch's) and a PRNG key
    (None where the graph draws no random numbers), and gives one array per output. Where the graph's sizes are bounds it takes
    the numbers that change, too: :meth:`xlatrain.bridge.capture.bounds.Bounds.values` as int32 and float32 arrays.

    Raises:
        LoweringError: ops of the graph have no lowering; all of them are listed, each with the user's line.
    """
    _check_lowerings(capture)
    staged = capture.staged(pipelining) if rolled and pipelining else None
    schedule = staged.schedule if staged else capture.rolled if rolled else unrolled(capture.graph.graph)
    starts = {} if schedule.loops else recomputations(capture.graph.graph)
    # Of a tensor whose memory an array shares, torch would no longer change the size.
    constants = {name: as_numpy(tensor.detach().clone()) for name, tensor in capture.constants.items()}
    turned = images(capture.graph.graph) if platform == "cpu" else frozenset[Node]()
    own = own_differences(capture.graph.graph)
    made = _made_fractions(capture.graph.graph)

    def run(
        inputs: Sequence[Any],
        key: jax.Array | KeyPerOp | None,
        found: IndexFindings | None = None,
        numbers: tuple[jax.Array, jax.Array] | None = None,
        /,
    ) -> list[Any]:
        found = found or IndexFindings(())
        found.follow(schedule)
        for op in staged.ops if staged else ():
            found.stand_in(op.op.node, op.original)
        true = None if capture.bounds is None or numbers is None else TrueNumbers(capture.bounds, *numbers)

        def compute(node: Node, operands: list[Any], draw: int | jax.Array | None) -> Any:
            if platform == "cpu" and true is None and node.target is torch.ops.aten.bmm.default:
                operands = unexpanded(node, operands)
            with _default_dtype(made[node]) if node in made else contextlib.nullcontext():
                value = _call(capture, node, operands, draw, found, true, turned=node in turned)
            return zero_of_themselves(value, own[node]) if node in own else value

        values = Values(schedule, platform, found, staged, mesh)
        given = iter(inputs)
        with use_key(key), partitioned_program(partitioned, mesh):
            for step in schedule.steps:
                if isinstance(step, Loop):
                    values.run(step, compute)
                elif step in starts:
                    _hold(starts[step], values)
                elif step.target is BARRIER and starts:
                    continue  # held with the first of its recomputation
                elif step.op == "placeholder":
                    values[step] = next(given)
                elif step.op == "get_attr":
                    name = cast(str, step.target)
                    values[step] = jnp.asarray(constants[name], jax_dtype(capture.constants[name].dtype))
                elif step.target in _IDENTITIES:
                    values[step] = values.row(operands_of(step)[0])
                elif step.op == "call_function":
                    values[step] = compute(step, [values[node] for node in operands_of(step)], None)
                else:
                    return [values.row(value) if rolled else values[value] for value in cast(Any, step.args[0])]
        raise AssertionError("a captured graph ends in an output node")

    return run


def _made_fractions(graph: torch.fx.Graph) -> dict[Node, torch.dtype]:
    """The ops that make fractions of whole numbers, with what was torch's default dtype when they were captured."""
    found = {}
    for node in graph.nodes:
        promised = node.meta.get("val")
        if node.op != "call_function" or not isinstance(promised, torch.Tensor) or promised.dtype not in _DEFAULTS:
            continue
        given = [one.meta.get("val") for one in node.all_input_nodes]
        if not any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in given):
            found[node] = promised.dtype
    return found


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block numbers become fractions of ``dtype``."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _hold(start: Recomputation, values: Values) -> None:
    """Put everything that a recomputation begins with behind a single optimization barrier."""
    inputs = [values[cast(Node, barrier.args[0])] for barrier in start.barriers]
    held = lax.optimization_barrier([*inputs, *(values[node] for node in start.held)])
    for node, value in zip((*start.barriers, *start.held), held, strict=True):
        values[node] = value


def _check_lowerings(capture: Capture) -> None:
    if capture.digest is not None:  # all are ours
        return
    missing: dict[str, str] = {}
    for node in capture.graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and lowering_of(node.target) is None:
            missing.setdefault(str(node.target), capture.user_line(node) or "in the backward pass or a library")
    if missing:
        listed = "\n".join(f"  {op}  ({where})" for op, where in sorted(missing.items()))
        raise LoweringError(
            f"the step uses {len(missing)} op(s) without a JAX lowering:\n{listed}\n"
            "Replace them by other torch ops, add a lowering with xlatrain.bridge.lower.registry.lowers, or run the step eagerly."
        )


def _call(
    capture: Capture,
    node: Node,
    operands: list[Any],
    draw: int | jax.Array | None,
    found: IndexFindings,
    true: TrueNumbers | None,
    *,
    turned: bool,
) -> Any:
    """Lower one op, with ``operands`` as the values of its nodes in the order of ``map_arg``.

    ``draw`` replaces the number of its draw; ``true`` are the numbers that change in the graph; if ``turned``, images have their
    channels last in it.
    """
    given = iter(operands)
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(given))
    if draw is not None:
        args = (*args[:-1], draw)
    if not isinstance(node.target, torch._ops.OpOverload):
        return cast(Any, node.target)(*args, **kwargs)  # operator.getitem on a tuple of results
    lowering = lowering_of(node.target)
    assert lowering is not None
    changing = true if true is not None and true.concerns(node) else None
    if changing is None:
        found.note(node, args)
    try:
        if changing is not None:
            value = compute_bounded(BoundedCall(node, args, kwargs, lowering, changing, found))
        else:
            value = channels_last(lowering, node, args, kwargs) if turned else lowering(*args, **kwargs)
    except BridgeError:
        raise
    except Exception as error:
        where = capture.user_line(node)
        raise LoweringError(
            f"{node.target} could not be lowered{f' ({where})' if where else ''}: {type(error).__name__}: {error}"
        ) from error
    return _as_promised(node, value, node.meta.get("val"))


def _as_promised(node: Node, value: Any, promised: Any) -> Any:
    """``value`` with the dtype that torch promised for it, its shape checked."""
    if isinstance(promised, torch.Tensor):
        value = jnp.asarray(value)
        if tuple(value.shape) != tuple(promised.shape):
            raise LoweringError(
                f"{node.target}: the lowering gave shape {tuple(value.shape)}, torch promised {TensorSpec.from_tensor(promised)}"
            )
        return value.astype(jax_dtype(promised.dtype))
    if isinstance(promised, list | tuple):
        return tuple(_as_promised(node, one, spec) for one, spec in zip(value, promised, strict=False))
    return value
