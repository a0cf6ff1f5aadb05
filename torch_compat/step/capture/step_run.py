"""A run of a step's Python on fake tensors, as a value: what it did can be compared with what another run did."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from torch_compat.step.effects.effects import Effects
from torch_compat.step.effects.logged import LogEntry
from torch_compat.step.host.batch_containers import BatchChange
from torch_compat.step.host.calls import HostCall
from torch_compat.step.host.host_memory import Refusal
from torch_compat.step.host.scalar_plan import ScalarPlan
from torch_compat.step.host.slots import ResultTemplate
from torch_compat.step.optimizers.inline import InlineKey
from torch_compat.step.optimizers.traced import OptimizerTrace
from xlatrain.bridge.capture.capture import Capture, Recording
from xlatrain.bridge.capture.op_log import Seen
from xlatrain.bridge.tensors.constants import contents_of
from xlatrain.bridge.tensors.strides import Strides


@dataclass(frozen=True)
class StepRun:
    """A run of a step. Nothing of what it did is left on the host.

    Attributes:
        ops: the digest of the ops that ran.
        outside: the tensors that these were given and the step was not.
        by_identity: whether ``ops`` means objects, which have other ids in another run of the process.
        text: what it leaves on the host besides what the ops compute, as text.
        reads: what it assumed about counters, asked of the batch, drew, and read of tensors from outside, as text.
        logs: the ``self.log`` calls.
        effects: tensors that it stores in Python objects, replayed on the host.
        calls: the host calls, see :mod:`torch_compat.step.host.calls`.
        result: the ``outputs`` of hooks: the user's return value with slots for ``values``; of a training step a dict with the
            loss divided by ``accumulate``, or ``{}`` where there is no loss.
        refusals: of memory that is shared beyond the step.
        seen: what ops have seen in tensors of ``outside`` whose memory others have.
        shared: ids of what is at several places in ``effects`` and ``result``, and is one object there.
        scalars: the uses of the loop's counters.
        optimizers: the optimizer steps in the graph, and the host actions before the program.
        requires_grad: the parameters whose flag the step leaves changed, with the new flag.
        assigned: the buffers to which it assigns another tensor, with its shape.
        strides: the parameters and buffers that it leaves with others.
        written: index of each tensor of the batch that it writes to in place → that of the value which is its last.
        batch_changes: what it changes in containers of the batch.
        param_names, buffer_names: of the state that is its input, in order.
        gradient_names: the parameters whose gradients are inputs.
        state_keys: the tensors of optimizers' states that are inputs.
        stores_graph: whether a tensor that it stores in a Python object could be differentiated there.
        differentiable: which of its values are results that depend on a parameter or on what requires gradients in the batch.
        recording: what its graph is made of.
    """

    ops: str = field(repr=False)
    outside: Sequence[torch.Tensor] = field(repr=False)
    by_identity: bool = field(repr=False)
    text: str = field(repr=False)
    reads: str = field(repr=False)
    logs: tuple[LogEntry, ...]
    effects: Effects
    calls: tuple[HostCall, ...]
    result: ResultTemplate
    shared: Collection[int]
    refusals: Sequence[Refusal]
    seen: Sequence[Seen]
    scalars: ScalarPlan
    optimizers: OptimizerTrace
    requires_grad: Mapping[str, bool]
    assigned: Mapping[str, tuple[int, ...]]
    strides: Mapping[str, Strides | None]
    written: Mapping[int, int]
    batch_changes: Sequence[BatchChange]
    param_names: tuple[str, ...]
    buffer_names: tuple[str, ...]
    gradient_names: tuple[str, ...]
    state_keys: tuple[InlineKey, ...]
    stores_graph: bool
    differentiable: tuple[int, ...]
    recording: Recording = field(repr=False)

    def same_as(self, other: StepRun) -> Difference | None:
        """The difference from ``other``; None where what was made of one serves for both.

        Other ops may come to the same graph, so graphs are made where the ops differ.
        """
        before, now = "", ""
        if self.ops != other.ops:
            before, now = graph_text(other), graph_text(self)
        in_graph = before != now
        if not in_graph and (self.text, self.reads) == (other.text, other.reads):
            return None
        old, new = f"{before}{other.text}\n{other.reads}", f"{now}{self.text}\n{self.reads}"
        return Difference(*_first_difference(old, new), in_graph)


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs of a step.

    Attributes:
        before, now: the line of either, for people.
        in_graph: whether they compute something else, rather than leave something else on the host.
    """

    before: str
    now: str
    in_graph: bool


def graph_of(run: StepRun) -> Capture:
    """The graph of a run, made when it is asked for first.

    Raises:
        NotRecordable: the step must run once more, in another way (:class:`~torch_compat.step.capture.step_capture.Way`).
    """
    return run.recording.graph()


def graph_text(run: StepRun) -> str:
    """The graph of a run, and the tensors from outside of the step in it, as lines."""
    graph = graph_of(run)
    return f"{graph.code}\n{''.join(map(text_of_constant, graph.constants.values()))}"


def text_of_constant(tensor: torch.Tensor) -> str:
    """A line about a tensor from outside of the step in a graph, with its values."""
    values = tensor.tolist() if tensor.numel() == 1 else f"of shape {list(tensor.shape)}"
    return f"a tensor from outside of the step, {str(tensor.dtype).removeprefix('torch.')} {values} {contents_of(tensor)}\n"


def _first_difference(before: str, now: str) -> tuple[str, str]:
    """The first lines in which two texts differ; where one is the beginning of the other, how long they are."""
    old, new = before.splitlines(), now.splitlines()
    for a, b in zip(old, new, strict=False):
        if a != b:
            return _readable(a), _readable(b)
    return f"{len(old)} operations", f"{len(new)} operations"


def _readable(line: str) -> str:
    """A line without our names for what differs from step to step."""
    line = re.sub(r"ValueSlot\((values|scalars|results)[^()]*\)", "<tensor>", line)
    line = re.sub(r"ValueSlot\(batch[^()]*\)", "<leaf of the batch>", line)
    return line.strip().replace("torch.ops.aten.", "aten.")[:200] or "nothing"
