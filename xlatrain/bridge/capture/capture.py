"""Run a function once on fake tensors and keep the pure graph of ATen ops that PyTorch saw.

All questions of PyTorch's semantics (autograd, in-place writes on views, autocast, custom Functions, checkpointing) are
answered here, by PyTorch itself: what comes out is functional and has its backward pass in it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import torch._dynamo  # torch imports it for the first optimizer, amid a run, and looks for garbage meanwhile
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, dispatch_functionalize
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from xlatrain.bridge.capture.compiling import compiling_state
from xlatrain.bridge.capture.cut import unanswered
from xlatrain.bridge.capture.decompositions.decomposition_table import decomposition_table
from xlatrain.bridge.capture.endowed import check_outgoing
from xlatrain.bridge.capture.functionalization import Functionalization, assignable_data
from xlatrain.bridge.capture.generation.library import generation_in_loops
from xlatrain.bridge.capture.masked_rows.made import masked_rows
from xlatrain.bridge.capture.masked_rows.masked_rows import exactly
from xlatrain.bridge.capture.masked_rows.packed import packed_sequences
from xlatrain.bridge.capture.masks import recognise_masks
from xlatrain.bridge.capture.offloading import offloads, without_needless_transfers
from xlatrain.bridge.capture.onednn import without_onednn
from xlatrain.bridge.capture.recorded import is_enabled
from xlatrain.bridge.capture.recorded.expansions import Expansions
from xlatrain.bridge.capture.recorded.fake_results import FlatCall
from xlatrain.bridge.capture.recorded.kinds import bucket_of, table_of_run
from xlatrain.bridge.capture.recorded.replay import Replay
from xlatrain.bridge.capture.recorded.tape import NotRecordable, Tape
from xlatrain.bridge.capture.recorded.true_strides import laid_out
from xlatrain.bridge.capture.traceable.attention_kernels import plain_attention
from xlatrain.bridge.capture.traceable.covariance import traceable_covariance
from xlatrain.bridge.capture.traceable.masked_assignment import selecting_masked_assignment
from xlatrain.bridge.capture.traceable.value_checks import check_operand_dtypes, without_linalg_checks
from xlatrain.bridge.capture.tracebacks import Origin, recorded_tracebacks, user_line_of
from xlatrain.bridge.capture.tree_maps import direct_tree_maps
from xlatrain.bridge.capture.vocabulary import pick_from_vocabularies
from xlatrain.bridge.errors import BridgeError, CaptureError, user_line
from xlatrain.bridge.host_draws import HostDraws
from xlatrain.bridge.inference_mode import without_inference_mode
from xlatrain.bridge.loops.rolling import copies_to_roll, roll
from xlatrain.bridge.loops.schedule import Schedule, unrolled
from xlatrain.bridge.loops.staging import Staged, stage
from xlatrain.bridge.patches import patched
from xlatrain.bridge.random import RandomStream, drawn_by_torch, stream_of_capture, virtual_rng_state
from xlatrain.bridge.tensors.strides import Strides, strides_of
from xlatrain.host.garbage import uncollected
from xlatrain.mesh.pipelining import Pipelining

if TYPE_CHECKING:
    from xlatrain.bridge.capture.bounds import Bounds


@dataclass(frozen=True)
class TensorSpec:
    """Shape, torch dtype and, where it is not contiguous, strides of one tensor of a captured graph."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: Strides | None = None

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype, strides_of(tensor))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Capture:
    """A captured function: a functional graph over flat tensors.

    Attributes:
        graph: the ``torch.fx`` graph; its placeholders are ``inputs``, its output is a flat list of tensors.
        inputs: one spec per tensor leaf of the arguments, in pytree order.
        outputs: one spec per tensor leaf of the result, in pytree order.
        result: the function's result with an ``int`` wrapped in :class:`Output` in place of each tensor.
        constants: tensors that the function used without receiving them, by the graph's attribute name.
        uses_random: True when the graph draws random numbers.
        host_draws: those that torch draws before the program runs; None: the program draws all.
        bounds: what changes in it, where its sizes are bounds of the true ones, which its program is told.
        digest: of all that programs are made from, where that is known: another process knows the graph, and has lowered it.
    """

    graph: torch.fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    result: Any
    constants: dict[str, torch.Tensor] = field(repr=False)
    uses_random: bool
    host_draws: HostDraws | None = field(default=None, repr=False)
    bounds: Bounds | None = field(default=None, repr=False)
    digest: str | None = field(default=None, repr=False, compare=False)
    _staged: dict[Pipelining, Staged] = field(default_factory=dict, repr=False, compare=False)

    def unflatten(self, outputs: list[Any]) -> Any:
        """The function's result with ``outputs`` (one per tensor, any type) in place of its tensors."""
        return pytree.tree_map_only(Output, lambda leaf: outputs[leaf.index], self.result)

    def with_constants(self, constants: Mapping[str, torch.Tensor]) -> Capture:
        """The same graph with other tensors of the same values as its constants."""
        same = copy.copy(self)  # with all that is known of the graph
        vars(same)["constants"] = dict(constants)
        return same

    @property
    def untraced(self) -> list[torch.Tensor]:
        """The tensors of the result that no op has made: they are in it as they are."""
        return [leaf for leaf in pytree.tree_leaves(self.result) if isinstance(leaf, torch.Tensor)]

    @functools.cached_property
    def rolled(self) -> Schedule:
        """The graph with its repeated layers rolled up into loops."""
        graph = self.graph.graph
        if self.bounds is not None:
            return unrolled(graph)
        with _uncollected():
            return roll(graph, copies_to_roll(offloading=offloads(graph)))

    def staged(self, pipelining: Pipelining) -> Staged:
        """The graph with its repeated layers on the stages of a mesh."""
        known = self._staged.get(pipelining)
        if known is None:
            graph, least = self.graph.graph, min(pipelining.chunks, copies_to_roll())
            with _uncollected():
                schedule = unrolled(graph) if self.bounds is not None else roll(graph, max(2, least))
                known = self._staged[pipelining] = stage(schedule, pipelining)
        return known

    @functools.cached_property
    def code(self) -> str:
        """The graph as a Python function, to compare it with another. Made when asked for: it takes a tenth of a capture."""
        return self.graph.graph.python_code("self").src

    @property
    def computation(self) -> str:
        """The graph in words, by which graphs are equal that differ in the names of nodes, and in inputs that have no use."""
        names: dict[torch.fx.Node, str] = {}
        lines: list[str] = []
        for position, node in enumerate(self.graph.graph.nodes):
            if node.op == "placeholder":
                names[node] = f"%input {position}"
                continue
            names[node] = f"%{len(lines)}"
            lines.append(f"{node.target} {map_arg((node.args, node.kwargs), names.__getitem__)}")
        return "\n".join(lines)

    def user_line(self, node: torch.fx.Node) -> str | None:
        """``file:line: source`` of the user's code that made a node of the graph; None in the backward pass."""
        return user_line_of(node, boundary=__file__)

    def source(self) -> str:
        """The graph as text, each op with the user's source line that caused it."""
        lines = []
        previous = None
        for node in self.graph.graph.nodes:
            origin = self.user_line(node)
            if origin and origin != previous:
                lines.append(f"# {origin}")
                previous = origin
            value = node.meta.get("val")
            spec = f"  # {TensorSpec.from_tensor(value)}" if isinstance(value, torch.Tensor) else ""
            lines.append(f"{node.format_node()}{spec}")
        return "\n".join(lines)


_NO_FUNCTION_METADATA: dict[str, Any] = {
    name: True for name in ("_disable_torch_fn_metadata_mode",) if name in inspect.signature(make_fx).parameters
}
"""It notes which torch function made a node, where ours note the user's line; torch 2.9 cannot leave it out."""


@dataclass(frozen=True)
class Output:
    """The place of the ``index``-th tensor in a captured function's result."""

    index: int


def capture(fn: Callable[..., Any], *args: Any) -> Capture:
    """Capture ``fn(*args)``.

    Args:
        fn: any function of tensors; it may call ``torch.autograd.grad``. It runs once, on fake tensors.
        *args: pytrees. Tensor leaves (real, fake or on ``meta``) are read for shape, dtype and ``requires_grad`` only.

    Raises:
        CaptureError: the function needs a tensor's value (``.item()``, ``if tensor``), named by the user's file and line.
    """
    call = FlatCall(args)
    result: Any = None
    stream = stream_of_capture()

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal result
        result, outputs = _split_outputs(fn(*call.args_with(tensors)))
        return outputs

    with stream, virtual_rng_state(), _capture_backends(), _named_failures():
        graph = _traced(flat, call.fakes, stream)
    return _finish(graph, call.fakes, result, stream)


class Recording:
    """A run of a function on fake tensors, of which the graph can be made, without another run.

    Args:
        make: makes the graph.
        origins: of the ops that it is made of; none where it is not made of a record of them.
    """

    def __init__(self, make: Callable[[], Capture], origins: Sequence[Origin] = ()) -> None:
        self._make: Callable[[], Capture] | None = make
        self._graph: Capture | None = None
        self.origins = origins

    def graph(self) -> Capture:
        """The graph; once it is made, all else of the run is let go of.

        Raises:
            NotRecordable: the function must run again, see :func:`record`.
        """
        if self._graph is None:
            assert self._make is not None
            self._graph, self._make = self._make(), None
        return self._graph


def record(fn: Callable[..., Any], *args: Any) -> Recording:
    """Run ``fn(*args)`` as :func:`capture` does, and note its ops.

    That costs a part of a capture, and so does its graph where the function does the same many times over, as the layers of a
    model do. A function can find out itself whether it still does the same, by an :class:`~xlatrain.bridge.capture.op_log.OpLog`.

    Raises:
        NotRecordable: it may have run, but :func:`capture` must run it again: it is more than its ops on plain tensors, or it
            raised, which may be for want of a fake result that :func:`capture` does not need.
    """
    stream = stream_of_capture()
    with stream, virtual_rng_state(), _capture_backends(), _uncollected(), _not_recordable():
        run, result = _run_recorded(fn, args, stream)

    def make() -> Capture:
        with stream, virtual_rng_state(), _capture_backends(), _uncollected():
            with _not_recordable():
                graph, fakes = _replayed(*run.pop(), args, stream)  # popped: all is let go of before garbage is looked for
            return _finish(graph, fakes, result, stream)

    return Recording(make, [one.origin for one in run[0][1].entries])


def capture_part(fn: Callable[..., Any], *args: Any) -> Capture:
    """:func:`capture`, into a graph of its own, a part that the capture which is going on has many times over: a loop's body.

    Values of its tensors are not to be had; its draws are numbered from 0.
    """
    call = FlatCall(args)
    result: Any = None

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal result
        result, outputs = _split_outputs(fn(*call.args_with(tensors)))
        return outputs

    with _disable_current_modes(), unanswered(), RandomStream() as stream:
        graph = _traced(flat, call.fakes, stream)
    return _finish(graph, call.fakes, result, stream)


@contextlib.contextmanager
def _not_recordable() -> Iterator[None]:
    try:
        with _named_failures():
            yield
    except NotRecordable:
        raise
    except Exception as error:
        raise NotRecordable(f"it cannot be recorded: {error}") from error


_Recorded = tuple[FlatCall, Tape, list[torch.Tensor]]


def _run_recorded(fn: Callable[..., Any], args: tuple[Any, ...], stream: RandomStream) -> tuple[list[_Recorded], Any]:
    """The parts that the graph is made of, and the result with :class:`Output` places."""
    call = FlatCall(args)
    kinds = table_of_run()
    bucket = bucket_of(kinds, call.fakes)
    if bucket is not None:
        kinds.take(bucket)
    with disable_autocast_cache(), call.mode, assignable_data(FakeTensor), Tape(call.mode, kinds, stream, _count_draws) as tape:
        result, outputs = _split_outputs(fn(*call.args_with(call.fakes)))
    if bucket is not None:
        kinds.keep(bucket, (one.kind for one in tape.entries if one.kind is not None and one.facts.known), tape.counted)
    return [(call, tape, outputs)], result


def _replayed(
    call: FlatCall, tape: Tape, outputs: list[torch.Tensor], args: tuple[Any, ...], stream: RandomStream
) -> tuple[torch.fx.GraphModule, list[FakeTensor]]:
    """The graph of a recorded run, and its inputs."""
    again = FlatCall(args)
    replay = Replay(tape, stream)
    graph = _traced(lambda *_: replay.run(call.fakes, again.fakes, outputs), again.fakes[:1], stream)
    replay.complete(graph.graph)
    return graph, again.fakes


def _traced(flat: Callable[..., list[torch.Tensor]], fakes: Sequence[torch.Tensor], stream: RandomStream) -> torch.fx.GraphModule:
    """The functional graph of ``flat(*fakes)``."""
    trace = make_fx(
        dispatch_functionalize(flat, Functionalization()),
        decomposition_table=laid_out(decomposition_table()) if drawn_by_torch() else decomposition_table(),
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
        **_NO_FUNCTION_METADATA,
    )
    with (
        recorded_tracebacks(),
        patched([(torch.fx.Graph, "eliminate_dead_code", lambda *_: False)]),  # done once, when it is finished
        Expansions(stream).copied() if is_enabled() else contextlib.nullcontext(),
        direct_tree_maps(),
        _use_lazy_graph_module(True),  # its code is made once, when it is finished
        _uncollected(),
    ):
        return trace(*fakes)


def _count_draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of random draws of an op, found by tracing it into a graph of its own."""
    call = FlatCall((args, kwargs))

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = call.args_with(tensors)
        return [one for one in pytree.tree_leaves(func(*args, **kwargs)) if isinstance(one, torch.Tensor)]

    with _disable_current_modes(), torch.no_grad(), RandomStream(by_torch=drawn_by_torch()) as stream:
        _traced(flat, call.fakes, stream)
    return stream.index


def rehearse(fn: Callable[..., Any], *args: Any) -> None:
    """Run ``fn(*args)`` as :func:`capture` does, but make no graph: a part of its time, for what :func:`record` cannot run.

    Raises:
        CaptureError: as :func:`capture`.
    """
    call = FlatCall(args)
    with (
        stream_of_capture(),
        virtual_rng_state(),
        _capture_backends(),
        _named_failures(),
        disable_autocast_cache(),
        _uncollected(),
        call.mode,
        assignable_data(FakeTensor),
    ):
        fn(*call.args_with(call.fakes))


def _finish(graph: torch.fx.GraphModule, fakes: Sequence[torch.Tensor], result: Any, stream: RandomStream) -> Capture:
    """The capture of a traced graph, whose ``fakes`` are its inputs: cleaned, checked and compiled to Python."""
    host_draws = HostDraws.of(graph.graph, stream)
    without_needless_transfers(graph.graph)
    _drop_dead(graph.graph)
    constants = {node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    masks = recognise_masks(graph.graph, constants)  # constants whose values decided there are no longer read, but still decide
    if pick_from_vocabularies(graph.graph) or masks:
        _drop_dead(graph.graph)
    check_operand_dtypes(graph.graph, functools.partial(user_line_of, boundary=__file__))
    graph.recompile()
    (returned,) = graph.graph.output_node().args
    outputs = tuple(TensorSpec.from_tensor(node.meta["val"]) for node in cast(Any, returned))
    inputs = tuple(TensorSpec.from_tensor(fake) for fake in fakes)
    return Capture(graph, inputs, outputs, result, constants, stream.used, host_draws)


def _drop_dead(graph: torch.fx.Graph) -> None:
    """``graph.eliminate_dead_code()``, in a time that depends on what is dead."""
    for node in reversed(graph.nodes):
        if not node.users and node.op not in ("placeholder", "output") and not node.is_impure():
            graph.erase_node(node)


def _split_outputs(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A result with :class:`Output` places, and its traced tensors. Untraced tensors stay in it as constants."""
    outputs: list[torch.Tensor] = []

    def output_place(tensor: torch.Tensor) -> Output | torch.Tensor:
        tensor = exactly(tensor)
        if not isinstance(tensor, FunctionalTensor | FakeTensor):
            return tensor
        check_outgoing(tensor)
        outputs.append(tensor.detach())
        return Output(len(outputs) - 1)

    return pytree.tree_map_only(torch.Tensor, output_place, value), outputs


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """See :func:`uncollected`: walking a graph again and again is a seventh of a capture.

    Where somebody collects all the same, ``gc.callbacks`` are not called: what they do is no part of the function.
    """
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    try:
        with uncollected():
            yield
    finally:
        gc.callbacks[:0] = callbacks


_NAMES = [
    (kind, name, getattr(torch.Tensor, name))
    for kind in (FakeTensor, FunctionalTensor)
    for name in ("__name__", "__qualname__", "__module__")
]
"""What user code that prints or looks up the class of a tensor expects."""


@contextlib.contextmanager
def _capture_backends() -> Iterator[None]:
    """Keep CPU-only kernels (fused attention, oneDNN) out of the graph."""
    with (
        plain_attention(),
        without_onednn(),
        compiling_state(),
        without_inference_mode(),
        assignable_data(FunctionalTensor),
        without_linalg_checks(),
        traceable_covariance(),
        selecting_masked_assignment(),
        generation_in_loops(capture_part),
        masked_rows(),
        packed_sequences(),
        patched(_NAMES),
    ):
        yield


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Turn PyTorch's tracing errors into a :class:`CaptureError` with the user's line and what to do."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    reasons: tuple[tuple[type[BaseException], str, str], ...] = (
        (
            DataDependentOutputException,
            "it reads the value of a tensor (.item(), float(t), if t:, a Python loop over t) while the step is compiled",
            "keep the value a tensor (torch.where instead of if), or read it in a hook outside the step",
        ),
        (
            GuardOnDataDependentSymNode,
            "a Python branch depends on the value of a tensor",
            "use torch.where, or move the branch to a hook outside the step",
        ),
        (
            DynamicOutputShapeException,
            "an op's output shape depends on the values of tensors, and XLA needs static shapes",
            "use a mask of fixed shape (torch.where, multiplication), or let x[mask] end in a sum, a mean or a loss",
        ),
        (UnsupportedOperatorException, "an op cannot be traced", "replace the op"),
        (UnsupportedFakeTensorException, "a tensor of a kind that cannot be traced is used", "use dense tensors"),
    )
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        where = user_line(traceback.extract_tb(error.__traceback__))
        for kind, reason, fix in reasons:
            if isinstance(error, kind):
                raise CaptureError(f"{where or 'the step'}\n  cannot be captured: {reason} ({error}).\n  Fix: {fix}.") from error
        if "SparseTensorImpl" in str(error):
            raise CaptureError(
                f"{where or 'the step'}\n  cannot be captured: it makes a sparse tensor, and XLA has none: "
                f"the gradient of an nn.Embedding with sparse=True is one ({error}).\n  Fix: use dense tensors, sparse=False."
            ) from error
        if "is not allocated" in str(error) or ".numpy()" in str(error):
            raise CaptureError(
                f"{where or 'the step'}\n  cannot be captured: a tensor of the compiled step has no value on the host yet "
                f"({error}).\n"
                "  Fix: stay with torch ops inside the step, or convert in a hook such as on_train_batch_end."
            ) from error
        raise
