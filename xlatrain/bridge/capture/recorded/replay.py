"""Make the graph of a run from its tape.

Each op goes once more through functionalization, decomposition and ``make_fx``; but where no op of the run writes to its memory,
and another op of its kind had operands with the same look in the graph, the nodes that the other one became are written down
again. No tensors are made for these until an op that goes the long way needs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.node import Node
from torch.utils._python_dispatch import _pop_mode_temporarily

from xlatrain.bridge.capture.op_log import argument_text, leaves_of
from xlatrain.bridge.capture.recorded.fake_results import Fakes
from xlatrain.bridge.capture.recorded.kinds import Ambient
from xlatrain.bridge.capture.recorded.sketches import Sketch
from xlatrain.bridge.capture.recorded.tape import Entry, NotRecordable, Tape
from xlatrain.bridge.capture.tracebacks import note_origin
from xlatrain.bridge.graph_nodes import Expansion, last_node, nodes_after, stands_for
from xlatrain.bridge.random import RandomStream, draws

_torch: Any = torch
_FUNCTIONAL: Any = torch._C._TorchDispatchModeKey.FUNCTIONAL
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY


class Replay:
    """The graph of a taped run: ``replay = Replay(tape, stream)``; ``make_fx`` of ``replay.run``; ``replay.complete(graph)``.

    Args:
        tape: of the run.
        stream: numbers the draws, as it did in the run.
    """

    def __init__(self, tape: Tape, stream: RandomStream) -> None:
        self._tape = tape
        self._stream = stream
        self._tensors: dict[int, Any] = {}
        self._nodes: dict[int, Node] = {}
        self._expansions: dict[Any, tuple[Expansion, list[int | None]] | None] = {}
        self._looks: dict[int, int] = {}
        self._numbers: dict[Any, int] = {}
        self._written: dict[int, bool] = {}
        self._outputs: list[Node | None] = []
        self._made_by: Fakes | None = None

    def run(
        self, inputs: Sequence[torch.Tensor], values: Sequence[FakeTensor], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Do what the run did. ``make_fx`` gives it the first of ``values`` only: there may be many.

        Args:
            inputs: the tensors that the run was given.
            values: like them, those of the graph's inputs.
            outputs: tensors of the run.

        Returns:
            What stands for those outputs that are more than a node of the graph.

        Raises:
            NotRecordable: it does not come to the same.
        """
        self._functional: Any = torch._C._get_dispatch_mode(_FUNCTIONAL)
        proxies: Any = torch._C._get_dispatch_mode(_PROXY)
        self._tracer = proxies.tracer
        self._mode = values[0].fake_mode
        for one, node in zip(inputs, self._placeholders(values), strict=True):
            self._nodes[id(one)] = node
        for entry in self._tape.entries:
            self._replay(entry)
        self._outputs = [None if self._tape.is_written(output) else self._nodes.get(id(output)) for output in outputs]
        return [self._tensor(output) for output, node in zip(outputs, self._outputs, strict=True) if node is None]

    def complete(self, graph: torch.fx.Graph) -> None:
        """Let the graph that was made of the run return all outputs."""
        end = graph.output_node()
        others = iter(cast(Any, end.args[0]))
        end.args = ([next(others) if node is None else node for node in self._outputs],)

    def _placeholders(self, values: Sequence[FakeTensor]) -> list[Node]:
        """The graph's inputs, named as ``make_fx`` names them, which would spend longer on each than on an op."""
        graph = self._tracer.graph
        found = list(graph.nodes)
        for value in values[len(found) :]:
            name = f"arg{len(found)}_1"
            found.append(graph.create_node("placeholder", name, (), {}, name))
            found[-1].meta["val"] = value
        return found

    def _replay(self, entry: Entry) -> None:
        if entry.kind is None or (self._tape.written and self._is_written(entry)):
            self._run(entry)
            return
        nodes = [self._node(operand) for operand in entry.operands]
        key = (entry.kind, *[self._look(node) for node in nodes], *_sameness(nodes))
        known = self._expansions.get(key)
        if known is not None:
            self._copy(*known, entry, nodes)
        elif key in self._expansions:
            self._run(entry)
        else:
            self._expansions[key] = self._first(entry, nodes)

    def _first(self, entry: Entry, nodes: list[Node]) -> tuple[Expansion, list[int | None]] | None:
        """Do the first op of its kind in the graph: as another graph has it, or the long way. Gives what later ones copy."""
        assert entry.kind is not None
        form = (*[_look_of(node.meta["val"]) for node in nodes], *_sameness(nodes))
        sketch = entry.kind.sketches.get(form)
        if sketch is None or not sketch.may_stand_for(entry.facts.func):
            last = last_node(self._tracer.graph)
            self._run(entry)
            found = self._expansion(entry, nodes, fresh := nodes_after(last))
            sketch = None if found is None or entry.draws else Sketch.of(nodes, fresh, found[1])
            if sketch is not None and sketch.may_stand_for(entry.facts.func):
                entry.kind.sketches[form] = sketch
            return found
        fresh = sketch.add(self._tracer.graph, nodes, self._fakes(self._mode))
        note_origin(fresh, entry.origin)
        self._note_results(entry, fresh, sketch.results)
        expansion = Expansion.from_nodes(nodes, fresh, entry.draw)
        return None if expansion is None else (expansion, sketch.results)

    def _copy(self, known: Expansion, places: list[int | None], entry: Entry, nodes: Sequence[Node]) -> None:
        made = known.copy(self._tracer.graph, nodes, entry.draw)
        note_origin(made, entry.origin)
        self._note_results(entry, made, places)

    def _note_results(self, entry: Entry, made: Sequence[Node], places: Sequence[int | None]) -> None:
        results = entry.result if type(entry.result) in (tuple, list) else [entry.result]
        for tensor, place in zip(results, places, strict=True):
            if place is not None:
                self._nodes[id(tensor)] = made[place]

    def _run(self, entry: Entry) -> None:
        """The long way."""
        last = last_node(self._tracer.graph)
        args, kwargs = self._mapped(entry.args), self._mapped(entry.kwargs)
        literal = draws(entry.facts.func)
        if not literal:
            self._stream.index = entry.draw
        with _surrounded_by(entry.ambient), _pop_mode_temporarily(_FUNCTIONAL):
            result = self._functional.__torch_dispatch__(entry.facts.func, (FunctionalTensor,), args, kwargs)
        if result is NotImplemented or (not literal and self._stream.index != entry.draw + entry.draws):
            raise NotRecordable(f"{entry.facts.func} came to something else")
        note_origin(nodes_after(last), entry.origin)
        for one, other in zip(leaves_of((entry.result,)), leaves_of((result,)), strict=True):
            if not isinstance(one, torch.Tensor):
                if argument_text(one, entry.facts.name) != argument_text(other, entry.facts.name):
                    raise NotRecordable(f"{entry.facts.func} gave {other}, not {one}")
            elif one.dtype != other.dtype or (one.shape != other.shape and id(one) not in self._tape.reshaped):
                raise NotRecordable(f"{entry.facts.func} gave {other.dtype}{other.shape}, not {one.dtype}{one.shape}")
            else:
                self._tensors[id(one)] = other
                self._nodes.pop(id(one), None)

    def _mapped(self, value: Any) -> Any:
        """Map arguments to what stands for their tensors."""
        kind = type(value)
        if kind is tuple:
            return tuple([self._mapped(one) for one in value])
        if kind is list:
            return [self._mapped(one) for one in value]
        if kind is dict:
            return {name: self._mapped(one) for name, one in value.items()}
        return self._tensor(value) if isinstance(value, FakeTensor) else value

    def _is_written(self, entry: Entry) -> bool:
        """Whether any op of the run may write to the memory of its operands or results."""
        known = self._written
        for one in leaves_of((entry.operands, entry.result)):
            if id(one) not in known:
                known[id(one)] = isinstance(one, torch.Tensor) and self._tape.is_written(one)
            if known[id(one)]:
                return True
        return False

    def _tensor(self, tensor: torch.Tensor) -> Any:
        """The tensor that stands for a tensor of the run; made, if there is only a node."""
        found = self._tensors.get(id(tensor))
        if found is None:
            node = self._nodes.get(id(tensor))
            if node is None:
                raise NotRecordable("a tensor of the run comes from nowhere")
            found = self._tensors[id(tensor)] = FunctionalTensor.to_functional(self._made(node))
        return found

    def _made(self, node: Node) -> FakeTensor:
        """A tensor that has ``node`` in the graph, and memory of its own: nothing writes to it."""
        value = node.meta["val"]
        tensor = self._fakes(value.fake_mode).of_look(_look_of(value))
        stands_for(tensor, node, self._tracer)
        return tensor

    def _fakes(self, mode: FakeTensorMode) -> Fakes:
        if self._made_by is None or self._made_by.mode is not mode:
            self._made_by = Fakes(mode)
        return self._made_by

    def _node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor of the run whose memory is never written to."""
        found = self._nodes.get(id(tensor))
        if found is None:
            found = self._nodes[id(tensor)] = self._node_of(self._tensor(tensor))
        return found

    def _node_of(self, tensor: Any) -> Node:
        inner = _torch._from_functional_tensor(tensor.elem) if isinstance(tensor, FunctionalTensor) else tensor
        return self._tracer.tensor_tracker[inner].proxy.node

    def _look(self, node: Node) -> int:
        """A number that is the same for nodes whose values look the same."""
        value = node.meta["val"]
        number = self._looks.get(id(value))
        if number is None:
            number = self._looks[id(value)] = self._numbers.setdefault(_look_of(value), len(self._numbers))
        return number

    def _expansion(self, entry: Entry, inputs: Sequence[Node], fresh: list[Node]) -> tuple[Expansion, list[int | None]] | None:
        """The nodes that an op became, and which of these it returned, None for no tensor; None if they must not be copied."""
        expansion = Expansion.from_nodes(inputs, fresh, entry.draw)
        if expansion is None:
            return None
        known = [one for one in map(self._tensor, entry.operands) if isinstance(one, FunctionalTensor)]
        if any(_torch._functionalize_has_data_mutation(one.elem) for one in known):
            raise NotRecordable(f"{entry.facts.func} writes to memory without saying so")
        results = entry.result if type(entry.result) in (tuple, list) else [entry.result]
        if any(one is not None and type(one) is not FakeTensor for one in results):
            return None
        nodes = [None if one is None else self._node(one) for one in results]
        if any(node is not None and node not in fresh for node in nodes):
            return None
        return expansion, [None if node is None else fresh.index(node) for node in nodes]


def _look_of(value: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int]:
    return value.dtype, value.shape, value.stride(), int(value.storage_offset())


def _sameness(nodes: Sequence[Node]) -> Sequence[int]:
    """The numbers of the nodes: equal nodes have equal numbers."""
    if len(nodes) < 2:
        return ()
    first: dict[Node, int] = {}
    return [first.setdefault(node, i) for i, node in enumerate(nodes)]


@contextlib.contextmanager
def _surrounded_by(ambient: Ambient) -> Iterator[None]:
    """Within the block an op is dispatched as it was in the run."""
    grad, autocast, dtype, default, include, exclude, *_ = ambient
    keys = torch._C.DispatchKeySet.from_raw_repr
    # Excluded in the run, where the op's call had taken the snapshot; here nothing has, and torch 2.11 and 2.12 insist on one.
    excluded = keys(exclude).remove(torch._C.DispatchKey.PythonTLSSnapshot)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with (
            torch._C._AutoDispatchBelowAutograd(),
            torch.set_grad_enabled(grad),
            torch.autocast("cpu", dtype, enabled=autocast, cache_enabled=False),
            torch._C._ForceDispatchKeyGuard(keys(include), excluded),
        ):
            yield
    finally:
        torch.set_default_dtype(before)
