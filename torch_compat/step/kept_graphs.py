"""Graphs and programs of a module's steps, which belong to the module: every run of it takes those that still hold.

A run begins with guards of its own, so it may not assume that a step reads what it read in the run before. It runs the step's
Python, as an audit does (:func:`~xlatrain.bridge.capture.capture.rehearse`), which makes no graph: where the same ops come of it
on inputs of the same shapes, with the same tensors from outside of the step in which nothing was written since, the graph of
an earlier run is the graph of this one. All else that a capture finds (reads, counters, logs, side effects, host calls, the
result) is found anew by this run. A program is taken where besides its graph all is equal that it was made from.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.tensors.constants import BakedTensor

_GRAPHS = 64  # of a module; those that were used last
_PROGRAMS = 8  # of a graph, and steps whose audits are known

Program = Callable[..., Any]


class KeptGraph:
    """A graph of a step, and the programs that were made from it.

    Neither may hold the step, whose calls and side effects hold objects of the user's, among them the module.

    Args:
        capture: the graph.
        outside: the tensors from outside of the step that its ops were given.
    """

    def __init__(self, capture: Capture, outside: Sequence[torch.Tensor]) -> None:
        self.capture = capture
        self._audited: OrderedDict[Hashable, int] = OrderedDict()
        self._outside = [BakedTensor(tensor) for tensor in outside]
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def holds(self, outside: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors from outside of the step, and nothing was written to them."""
        same = len(outside) == len(self._outside) and all(map(lambda a, b: a.tensor is b, self._outside, outside))
        return same and all(one.is_whole() for one in self._outside)

    def audited(self, done: Hashable) -> int:
        """The last audit that a step of this graph has stood, by the number of runs before it; 0 for none.

        Args:
            done: what the step does besides, and what it reads.
        """
        return self._audited.get(done, 0)

    def note_audited(self, done: Hashable, runs: int) -> None:
        """Note that a step did the same once more before its next run; for ``done`` see :meth:`audited`."""
        self._audited[done] = max(runs, self._audited.pop(done, 0))
        if len(self._audited) > _PROGRAMS:
            self._audited.popitem(last=False)

    def program(self, key: Hashable | None, make: Callable[[], Program]) -> tuple[Program, bool]:
        """The program made from the graph and from what ``key`` says, and whether it was there.

        Args:
            key: all that the program is made from, besides the graph; None: it cannot be said.
            make: makes the program.
        """
        if key is None:
            return make(), False
        program = self._programs.get(key)
        if program is not None:
            self._programs.move_to_end(key)
            return program, True
        program = self._programs[key] = make()
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        return program, False


class ModuleGraphs:
    """The graphs of one module's steps."""

    def __init__(self) -> None:
        self._graphs: OrderedDict[Hashable, KeptGraph] = OrderedDict()

    def begin_run(self) -> RunGraphs:
        """The graphs as a run that begins now sees them."""
        return RunGraphs(self._graphs)


class RunGraphs:
    """The graphs of a module's steps in one of its runs: those of earlier runs can be taken.

    Args:
        graphs: of the module, by what is known before a step's Python runs, and the digest of its ops.
    """

    def __init__(self, graphs: OrderedDict[Hashable, KeptGraph]) -> None:
        self._graphs = graphs
        self._earlier = {form for form, _ in graphs}  # pyright: ignore[reportGeneralTypeIssues]

    def may_have(self, form: Hashable) -> bool:
        """Whether an earlier run had a step of this form."""
        return (form, settings()) in self._earlier

    def find(self, form: Hashable, digest: str, outside: Sequence[torch.Tensor]) -> KeptGraph | None:
        """The graph of these ops, or None; for the arguments see :meth:`keep`."""
        key = ((form, settings()), digest)
        found = self._graphs.get(key)
        if found is None or not found.holds(outside):
            return None
        self._graphs.move_to_end(key)
        return found

    def keep(self, form: Hashable, digest: str, capture: Capture, outside: Sequence[torch.Tensor]) -> KeptGraph:
        """Keep a graph for later runs.

        Args:
            form: names and shapes of the step's inputs.
            digest: of the ops that ran (:class:`~xlatrain.bridge.capture.op_log.OpLog`).
            capture: the graph.
            outside: the tensors that the ops were given and the step was not.
        """
        kept = self._graphs[(form, settings()), digest] = KeptGraph(capture, outside)
        if len(self._graphs) > _GRAPHS:
            self._graphs.popitem(last=False)
        return kept


def settings() -> Hashable:
    """The settings of the process by which equal ops may become another graph, or another program."""
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision())
    return (*flags, *((name, value) for name, value in sorted(os.environ.items()) if name.startswith(("XLATRAIN_", "XLA_"))))


_OF_MODULES: dict[int, tuple[weakref.ref[torch.nn.Module], ModuleGraphs]] = {}  # a module may not be hashable, or equal others


def graphs_of(module: torch.nn.Module) -> ModuleGraphs:
    """The graphs of a module's steps; they are freed when the module is."""
    number = id(module)
    found = _OF_MODULES.get(number)
    if found is None or found[0]() is not module:
        reference = weakref.ref(module, lambda gone: _forget(number, gone))
        found = _OF_MODULES[number] = (reference, ModuleGraphs())
    return found[1]


def _forget(number: int, gone: weakref.ref[torch.nn.Module]) -> None:
    if number in _OF_MODULES and _OF_MODULES[number][0] is gone:
        del _OF_MODULES[number]
