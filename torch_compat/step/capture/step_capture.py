"""Runs of a step: the user's Python runs once on fake tensors, with everything around it that a run has.

What is run, and what is differentiated, is the spec's: see :mod:`torch_compat.step.capture.user_steps` and
:mod:`torch_compat.step.capture.module_call`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import traceback
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.nn.utils.stateless import _reparametrize_module

from torch_compat.plugins.loss_scaling import LossScaling
from torch_compat.run.batches import BatchSpec
from torch_compat.step.capture.step_run import StepRun
from torch_compat.step.capture.step_trace import StepTrace
from torch_compat.step.capture.taken_hooks import TakenHooks
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.effects.recorder import EffectRecorder
from torch_compat.step.guards.module_tensors import still_there
from torch_compat.step.guards.parameter_hooks import hooks_of
from torch_compat.step.host.batch_containers import BatchContainers
from torch_compat.step.host.batch_texts import BatchTexts
from torch_compat.step.host.batch_values import AskedValues
from torch_compat.step.host.changing_numbers import ChangingNumbers
from torch_compat.step.host.functions import recording_host_functions
from torch_compat.step.host.host_values import HostValues
from torch_compat.step.host.input_functions import InputFunctions
from torch_compat.step.host.later_text import plain_messages
from torch_compat.step.host.number_functions import taking_host_scalars
from torch_compat.step.host.offsets import MovingOffsets
from torch_compat.step.host.regions import slicing_at_moving_bounds
from torch_compat.step.host.scalar_plan import SLOTS, ArrayForm
from torch_compat.step.host.scalars import ScalarTracer, was_written
from torch_compat.step.host.slots import ResultTemplate, TensorSlot
from torch_compat.step.kept_graphs import RunGraphs
from torch_compat.step.optimizers.inline import InlineKey
from torch_compat.step.optimizers.traced import OptimizerTrace
from torch_compat.step.placed_batch import SharedMemory
from xlatrain.bridge.capture.capture import Recording, capture, record, rehearse
from xlatrain.bridge.capture.cut import answering
from xlatrain.bridge.capture.endowed import check_kept, endowing
from xlatrain.bridge.capture.op_log import OpLog, Seen
from xlatrain.bridge.capture.recorded.tape import NotRecordable
from xlatrain.bridge.capture.stand_ins import as_parameters, standing_for
from xlatrain.bridge.errors import BridgeError, CaptureError, said_once, user_line
from xlatrain.bridge.random import drawing_by_torch
from xlatrain.bridge.tensors.dtypes import jax_dtype, torch_dtype
from xlatrain.bridge.tensors.strides import Geometry, Strides, empty, meet, strides_of
from xlatrain.cluster.distributed import world
from xlatrain.step.loss_scale import LossScaler

UserCall = Callable[[Any, ScalarTracer], Any]
"""A call of the user's method with a batch and the tracer's counters."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs with which a step is captured.

    Attributes:
        params, buffers: name → a tensor (values are not read) with the parameter's shape, dtype and ``requires_grad``.
        leaves: the batch's tensors, of *global* shape.
        spec: puts the leaves back into the user's batch.
        call: ``(batch, tracer) -> result``, calls the user's method with the tracer's counters.
        host_values: the loop's counters now.
        reading: the context of the call, in which its reads and draws are followed.
        scaler: loss scaling, whose state the step gets after the counters; the step gives gradients of the scaled loss, or takes
            its optimizer steps with it.
        backward: ``(loss, differentiate)``, the user's own backward: it calls ``differentiate`` with the loss to differentiate.
        around_backward: the context of the backward pass, which runs user code, too.
        gradients: name → a tensor like the gradient that the parameter has when the step begins; it is an input of the step.
        graphs: of the module's steps, of which one may be taken; None: none is kept.
        arrays: the forms of arrays that the step gets after the counters.
        states: like those of optimizers whose Python runs in the step; inputs, too. None: no optimizer runs in it.
        numbers: of a step whose Python runs before each of its programs: those of its Python that change become inputs.
        offsets: how it takes places that are known before it.
        shared: which of the leaves have the memory of others.
        carried: the user's tensors, which it carries from batch to batch, that its last leaves stand for.
        by_torch: whether torch draws its random numbers, on the host.
        functions: that are called before the step, where that can be.
        watches_draws: whether draws by functions that somebody imported by name are looked for.
    """

    params: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    leaves: Sequence[torch.Tensor]
    spec: BatchSpec
    call: UserCall
    host_values: HostValues
    reading: Callable[[ScalarTracer, HostValues], contextlib.AbstractContextManager[Any]]
    scaler: LossScaler | None = None
    backward: Callable[[torch.Tensor, Callable[..., None]], Any] | None = None
    around_backward: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    gradients: Mapping[str, torch.Tensor] = field(default_factory=dict)
    graphs: RunGraphs | None = None
    arrays: tuple[ArrayForm, ...] = ()
    states: Mapping[InlineKey, torch.Tensor] | None = None
    numbers: ChangingNumbers | None = None
    offsets: MovingOffsets = field(default_factory=MovingOffsets)
    shared: Sequence[SharedMemory] = ()
    carried: Sequence[torch.Tensor] = ()
    by_torch: bool = False
    functions: tuple[types.FunctionType, ...] = ()
    watches_draws: bool = False

    @property
    def form(self) -> Hashable:
        """The names, shapes and strides of the inputs."""
        leaves = tuple((tuple(leaf.shape), leaf.dtype, strides_of(leaf)) for leaf in self.leaves)
        states = tuple((key, tuple(one.shape), one.dtype) for key, one in (self.states or {}).items())
        buffers = tuple((name, tuple(one.shape)) for name, one in self.buffers.items())
        strides = (*map(strides_of, (*self.params.values(), *self.buffers.values())), self.shared)
        return (tuple(self.params), buffers, tuple(self.gradients), leaves, self.scaler, self.arrays, states, strides)

    @property
    def may_be_kept(self) -> bool:
        """Whether an earlier run of the module had a step of this form, whose graph may be taken."""
        return self.graphs is not None and self.graphs.may_have(self.form)


@dataclass(frozen=True)
class TraceContext:
    """The context of the user's Python during a capture.

    Attributes:
        live: the context in which live parameters stand for traced tensors, by name (see :mod:`xlatrain.bridge.tensors.live`).
        logging: directs ``self.log`` into a recorder, and gives ``trainer.global_step`` and its like the tracer's counters.
        forward: the precision plugin's forward context.
        optimizers: puts stand-ins of optimizers and schedulers in place, given the traced parameters and states.
    """

    live: Callable[[Mapping[str, torch.Tensor]], contextlib.AbstractContextManager[Any]]
    logging: Callable[[LogRecorder, ScalarTracer], contextlib.AbstractContextManager[Any]]
    forward: Callable[[], contextlib.AbstractContextManager[Any]]
    optimizers: Callable[
        [ScalarTracer, Mapping[str, torch.Tensor], Mapping[InlineKey, torch.Tensor] | None],
        contextlib.AbstractContextManager[OptimizerTrace],
    ]


class Way(enum.Enum):
    """The way in which a step's Python runs on fake tensors."""

    RECORDED = "its ops are recorded, and its graph can be made of them"
    OP_BY_OP = "as it runs; there is no graph"
    TRACED = "as it runs, each op into the graph"


Grads = dict[str, torch.Tensor | None]
StepBody = Callable[[StepInputs, StepTrace, Mapping[str, torch.Tensor], Any, ScalarTracer], Grads]


@dataclass(frozen=True)
class StepSpec:
    """A step of a module, which can be run any number of times.

    Attributes:
        module: the module.
        recorder: finds what a run changes in Python objects, and takes it back.
        context: of the user's Python.
        body: ``(inputs, trace, parameters by name, batch, tracer) -> gradients by name``; sets the trace's ``result``.
        inputs: gives the inputs of a run, as they are at its moment, with the host values that it gets.
        grad: whether it runs with gradients.
    """

    module: torch.nn.Module
    recorder: EffectRecorder
    context: TraceContext
    body: StepBody
    inputs: Callable[[HostValues], StepInputs]
    grad: bool = True


_STAND_INS = ("HostArray", "HostScalar", "HostFuture", "Deferred", "FakeTensor", "INTERNAL ASSERT", "JSON serializable")
"""What errors of torch and of extensions name that got no real number or tensor."""

_OF_A_COPY = "; instead of a copied module, torch.func.functional_call(module, {name: cloned parameter}, args)"


def run_step(spec: StepSpec, inputs: StepInputs, way: Way) -> StepRun:
    """Run a step once on fake tensors, with the module's parameters replaced by them.

    Args:
        spec: the step.
        inputs: those of ``spec.inputs``.
        way: how its Python runs.

    Raises:
        CaptureError: see :func:`xlatrain.bridge.capture.capture.capture`, and what cannot be repeated after every step.
        NotRecordable: it has run, and must run as it is once all that it did is taken back.
        MetricsImportedError: likewise, once torchmetrics is imported.
        Exception: the step's own, or that of an op which refuses its arguments, with the user's line as a note.
    """
    module, trace = spec.module, StepTrace()
    trace.logs.on_host = inputs.numbers is not None  # numbers of earlier steps would make another program each time
    flags = {name: param.requires_grad for name, param in inputs.params.items()}
    hooks = {name: hooks_of(param) for name, param in inputs.params.items()}
    changed_flags: dict[str, bool] = {}
    assigned: dict[str, torch.Size] = {}
    left_strides: dict[str, Strides | None] = {}
    ops = ""
    outside: Sequence[torch.Tensor] = ()
    seen: Sequence[Seen] = ()
    by_identity = False

    def run_on_fakes(
        params: list[torch.Tensor],
        buffers: list[torch.Tensor],
        leaves: list[torch.Tensor],
        scalars: list[torch.Tensor],
        states: list[torch.Tensor],
        gradients: list[torch.Tensor],
    ) -> dict[str, Any]:
        nonlocal ops, outside, seen, by_identity
        wholes, fractions, *rest = scalars
        arrays, scale = rest[: len(inputs.arrays)], rest[len(inputs.arrays) :]
        scaling = None if inputs.scaler is None else LossScaling(inputs.scaler, *scale)
        tracer = ScalarTracer(inputs.host_values, wholes, fractions, scaling, arrays)
        tracer.watches_draws = inputs.watches_draws
        tracer.calls = trace.calls
        trace.scalars = tracer.plan
        values = {
            name: standing_for(value.detach().requires_grad_(flags[name]), param)
            for (name, param), value in zip(inputs.params.items(), params, strict=True)
        }
        trace.hooks = TakenHooks(hooks, values)
        held = [gradient.detach() for gradient in gradients]
        own = None if inputs.states is None else dict(zip(inputs.states, [one.detach() for one in states], strict=True))
        for name, gradient in zip(inputs.gradients, held, strict=True):
            values[name].grad = gradient
        state = {name: standing_for(value, buffer) for (name, buffer), value in zip(inputs.buffers.items(), buffers, strict=True)}
        before = dict(state)
        trace.calls.memory.has([*values.values(), *state.values()])
        leaves = _of_one_memory(leaves, inputs.shared)
        asked = trace.calls.asked = AskedValues(
            tracer,
            inputs.host_values,
            leaves,
            dict(zip(inputs.params, params, strict=True)),
            dict(zip(inputs.buffers, buffers, strict=True)),
            inputs.offsets,
        )
        tracer.plan.offsets_exact = inputs.offsets.exact
        own_buffers = dict(module.named_buffers(remove_duplicate=False))
        with (
            answering(asked),
            as_parameters(),
            endowing(),
            OpLog([*params, *values.values(), *held, *(own or {}).values(), *buffers, *leaves, *scalars]) as log,
            spec.context.live({**values, **state}),
            spec.context.logging(trace.logs, tracer),
            spec.context.optimizers(tracer, values, own) as trace.optimizers,
            # stack_weights: a module under two names is swapped twice, and only the last swap undone first gives its own back
            _reparametrize_module(module, still_there(module, {**values, **state}), tie_weights=True, stack_weights=True),
        ):
            at_first = len(leaves) - len(inputs.carried)
            own_memory = [(own_buffers[name], one) for name, one in state.items() if name in own_buffers]
            own_memory += [*zip(inputs.params.values(), values.values(), strict=True)]
            own_memory += [*zip(inputs.carried, leaves[at_first:], strict=True)]
            with (
                plain_messages(),
                spec.context.forward(),
                spec.recorder.recording() as recording,
                trace.metrics.recording(),
                recording_host_functions(trace.calls),
                taking_host_scalars(),
                trace.calls.memory.active(),
                slicing_at_moving_bounds(inputs.offsets),
                contextlib.nullcontext() if inputs.numbers is None else inputs.numbers.lifting(tracer),
                trace.hooks.followed(),
                InputFunctions(inputs.functions, tracer, asked).available(),
            ):
                recording.calls = trace.calls
                texts = BatchTexts(tracer)
                batch = texts.watch(inputs.spec.unflatten(leaves, texts.wrap_leaf))
                containers = BatchContainers(batch, inputs.spec.others)
                with inputs.reading(tracer, inputs.host_values):  # backward and the hooks of gradients read attributes, too
                    grads = spec.body(inputs, trace, values, batch, tracer)
                    trace.optimizers.finish()
                own_written = [one for one, fake in own_memory if was_written(fake)]
                params = [*inputs.params.values()]
                trace.calls.memory.check(
                    log.outside, [one for one, _ in own_memory], own_written, params
                )  # before all is put back
                inputs.spec.put_back()
                check_kept(leaves)
                _check_written({**dict(enumerate(leaves)), **values, **state}, inputs.shared)
            tracer.check_arrays()
            changed = _changed_buffers(module, before, inputs.buffers)
            assigned.update({name: one.shape for name, one in changed.items() if one is not state[name]})
            known = inputs.host_values.batch
            carried = range(at_first, len(leaves))
            of_batch = [(index, leaves[index]) for index in (*range(0 if known is None else len(known.leaves)), *carried)]
            for index, leaf in of_batch:
                if trace.writes and was_written(leaf):
                    trace.write(index, leaf)
            trace.places.views = trace.keeps_own and world().process_count == 1  # which have their rows of the batch only
            if trace.keeps_own:
                for name, one in {**values, **state, **changed}.items():
                    if not (name in assigned and one.requires_grad):
                        trace.places.add(one, TensorSlot(name))
                for index, leaf in of_batch:
                    if not leaf.requires_grad and world().process_count == 1:
                        trace.places.add(leaf, TensorSlot(index))
                trace.assigned = [(changed[name], name) for name in assigned]
            if trace.keeps_own:
                recording.of_batch = containers.slots()
            if trace.places.views:
                trace.look(recording.kept(), containers.kept() if trace.writes else ())
            template = functools.partial(trace.template, batch=inputs.spec.others)
            if trace.writes:
                trace.changes = containers.changes(template)
            trace.finish(recording, inputs.spec.others)
            texts.finish()
            changed_flags.update({n: v.requires_grad for n, v in values.items() if v.requires_grad != flags[n]})
            left_strides.update(_changed_strides(values, inputs.params))
            left_strides.update(_changed_strides({**state, **changed}, inputs.buffers))
            now = dict(module.named_buffers())
            loss_scale = [] if scaling is None else [scaling.scale, scaling.growth_tracker]
            assumed = asked.assumed.traced
            left = trace.optimizers.collect()
            outcome = (
                trace.logs.scalars,
                grads,
                trace.values,
                trace.optimizers.tokens,
                loss_scale,
                [now.get(n, b) for n, b in state.items()],
                assumed,
                left,
            )
            ops, outside, by_identity = log.digest(outcome), log.outside, log.by_identity
            seen = tuple(log.seen.values())
        written = {name: value.detach() for name, value in values.items() if was_written(value)}
        tokens = trace.optimizers.tokens
        values_out = {"scalars": trace.logs.scalars, "values": trace.values, "tokens": tokens, "loss_scale": loss_scale}
        values_out |= {"assumed": assumed, "states": left}
        return {"grads": grads, "params": written, "buffers": changed, **values_out}

    arguments = (
        [_spec(p) for p in inputs.params.values()],
        [_spec(b) for b in inputs.buffers.values()],
        list(inputs.leaves),
        _scalar_specs(inputs.scaler, inputs.arrays),
        list((inputs.states or {}).values()),
        [_spec(gradient) for gradient in inputs.gradients.values()],
    )
    with _naming_the_line(), said_once(), torch.set_grad_enabled(spec.grad), drawing_by_torch(inputs.by_torch):
        recording = _RUNS[way](run_on_fakes, *arguments)
    return StepRun(
        ops=ops,
        outside=outside,
        by_identity=by_identity,
        text=f"{trace.text()}\n{changed_flags}{assigned or ''}{left_strides or ''}{trace.written or ''}",
        reads=trace.scalars.read,
        logs=tuple(trace.logs.entries),
        effects=trace.effects,
        calls=trace.made,
        result=ResultTemplate(trace.result),
        shared=trace.places.shared,
        refusals=trace.calls.memory.refusals,
        seen=seen,
        scalars=trace.scalars,
        optimizers=trace.optimizers,
        requires_grad=changed_flags,
        assigned=assigned,
        strides=left_strides,
        written=trace.written,
        batch_changes=trace.changes,
        param_names=tuple(inputs.params),
        buffer_names=tuple(inputs.buffers),
        gradient_names=tuple(inputs.gradients),
        state_keys=tuple(inputs.states or ()),
        stores_graph=trace.stores_graph,
        differentiable=trace.differentiable,
        recording=recording,
    )


def _rehearsed(function: Callable[..., Any], *args: Any) -> Recording:
    rehearse(function, *args)
    return Recording(_no_graph)


def _no_graph() -> NoReturn:
    raise NotRecordable("it has run as it is, and was not traced")


def _traced(function: Callable[..., Any], *args: Any) -> Recording:
    graph = capture(function, *args)
    return Recording(lambda: graph)


_RUNS = {Way.RECORDED: record, Way.OP_BY_OP: _rehearsed, Way.TRACED: _traced}


@contextlib.contextmanager
def _naming_the_line() -> Iterator[None]:
    """Errors of a capture name the user's line; those of torch that tell of stand-ins say what to do."""
    try:
        yield
    except NotRecordable as error:
        if isinstance(error.__cause__, Exception):
            raise error from _with_line(error.__cause__)
        raise
    except Exception as error:
        named = _with_line(error)
        if named is error:
            raise
        raise named from error


def _with_line(error: Exception) -> Exception:
    """``error``, which has the user's line noted, or what is said in its place."""
    # The classes of traced tensors call themselves Tensor.
    named = any(name in str(error) for name in _STAND_INS) or (isinstance(error, TypeError) and "Tensor" in str(error))
    if isinstance(error, BridgeError) or not isinstance(error, TypeError | RuntimeError | ValueError) or not named:
        _note_line(error)
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = user_line(frames) or "the step"
    said = str(error).partition(" If you're using torch.compile")[0].rstrip(".")  # torch's advice to writers of kernels
    made = CaptureError(
        f"{where}\n  cannot be captured: a stand-in for a value of the running step reached code that wants the value "
        f"itself ({type(error).__name__}: {said}).\n  Fix: compute it with tensors, or in a hook outside the step"
        f"{_OF_A_COPY if any(frame.name == 'deepcopy' for frame in frames) else ''}."
    )
    made.__cause__ = error
    return made


def _note_line(error: Exception) -> None:
    """Say at the end of the traceback, most of which is torch's capture, where in the user's code it happened."""
    line = user_line(traceback.extract_tb(error.__traceback__))
    if line is not None and not isinstance(error, BridgeError):
        error.add_note(f"in {line}")


def _scalar_specs(scaler: LossScaler | None, arrays: Sequence[ArrayForm]) -> list[torch.Tensor]:
    """Shapes and dtypes of the host's inputs: whole numbers, fractions, arrays; if wanted, loss scale and growth tracker."""
    fractions = torch_dtype(jax_dtype(torch.float64))  # as many bits as XLA has for Python's numbers
    specs = [((SLOTS,), torch.int64), ((SLOTS,), fractions), *((form.shape, form.dtype) for form in arrays)]
    if scaler is not None:
        specs += [((), torch.float32), ((), torch.int32)]
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]


def _spec(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the parameter's shape, dtype and strides without values, made without touching the parameter's."""
    return empty(tensor.shape, tensor.dtype, strides_of(tensor), "meta")


def _of_one_memory(leaves: Sequence[torch.Tensor], shared: Sequence[SharedMemory]) -> list[torch.Tensor]:
    """The leaves, of which those that show the same elements of one memory do so here."""
    leaves = list(leaves)
    for one in shared:
        if isinstance(one.of, int) and one.geometry == one.of_geometry and leaves[one.index].dtype == leaves[one.of].dtype:
            leaves[one.index] = leaves[one.of] if one.is_it else leaves[one.of].detach()
    return leaves


def _check_written(tensors: Mapping[int | str, torch.Tensor], shared: Sequence[SharedMemory]) -> None:
    """Raises:
    CaptureError: a tensor that was written to shows memory of another one.
    """
    groups: dict[int | str, dict[int | str, Geometry]] = {}
    for one in shared:
        groups.setdefault(one.of, {one.of: one.of_geometry})[one.index] = one.geometry
    for group in groups.values():
        for place in group:
            others = [other for other, geometry in group.items() if geometry != group[place] or isinstance(place, str)]
            size = tensors[place].itemsize
            if was_written(tensors[place]) and any(meet(group[place], group[other], size) for other in others if other != place):
                raise CaptureError(
                    "the step writes in place to a tensor of the batch, of the module, or of an earlier step, of which another "
                    "one that it is given is a view: a compiled step has two. Write to a copy (.clone())"
                )


def _changed_strides(now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> dict[str, Strides | None]:
    """The strides of tensors, by name, that are others than before."""
    return {name: strides_of(now[name]) for name, one in before.items() if strides_of(now[name]) != strides_of(one)}


def _changed_buffers(
    module: torch.nn.Module, before: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Buffers that the step wrote to, in place or by assignment, with their new values.

    Raises:
        CaptureError: one is resized in place, or of another kind of numbers for the steps that follow.
    """
    now = dict(module.named_buffers(remove_duplicate=False))
    changed: dict[str, torch.Tensor] = {}
    for name, value in before.items():
        current = now.get(name, value)
        if current is not value or was_written(value):
            shape = tuple(given[name].shape)
            if _kind(current) != _kind(value) or (current is value and current.shape != shape):
                raise CaptureError(
                    f"the step makes the buffer self.{name} a tensor {tuple(current.shape)} of {current.dtype}, but it was "
                    f"{shape} of {value.dtype}: a compiled step has one kind of each, and resizes none in place. Assign a new "
                    f"tensor of {value.dtype} to it"
                )
            other = next((other for other, one in changed.items() if one is current), None)
            if other is not None:
                raise CaptureError(
                    f"the step assigns one tensor to the buffers self.{other} and self.{name}, and hooks may change it in "
                    "both; a compiled step would make two. Assign a copy to one (.clone())"
                )
            changed[name] = current.to(value.dtype)
    return changed


def _kind(tensor: torch.Tensor) -> str:
    """The kind of a tensor's numbers."""
    kinds = {"complex": tensor.is_complex(), "float": tensor.is_floating_point(), "bool": tensor.dtype == torch.bool}
    return next((kind for kind, found in kinds.items() if found), "int")
