"""Graphs and programs of a module's steps: every run of it takes those that still hold, and so do other modules.

A run begins with guards of its own, so it may not assume that a step reads what it read in the run before. It runs the step's
Python, as an audit does (:func:`~xlatrain.bridge.capture.capture.rehearse`), which makes no graph: where the same ops come of it
on inputs of the same shapes, with tensors from outside of the step that have the same values, the graph of
an earlier run is the graph of this one. All else that a capture finds (reads, counters, logs, side effects, host calls, the
result) is found anew by this run. A program is taken where besides its graph all is equal that it was made from.

Nothing of this asks which module it is, so that the modules of a cross-validation have the graphs and programs of one. Audits
are of one module: that another's step does the same each time says nothing of this one's.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import torch

from xlatrain.bridge.capture.capture import Capture
from xlatrain.bridge.capture.tracebacks import Origin
from xlatrain.bridge.lower import stored_graphs
from xlatrain.bridge.tensors.constants import SMALL, BakedTensor, bytes_of
from xlatrain.xla.told import OF_NO_PROGRAM, NotToldError, told

_GRAPHS = 64  # of a module; those that were used last
_ANY_MODULE_S = 8  # graphs that any module may take; they outlive theirs, with some 5 MiB for each program
_PROGRAMS = 8  # of a graph, and steps whose audits are known

Program = Callable[..., Any]


class KeptGraph:
    """A graph of a module's step, and the programs that were made from it.

    Neither may hold the step, whose calls and side effects hold objects of the user's, among them the module.

    Args:
        capture: the graph.
        outside: the tensors from outside of the step that its ops were given.
        programs: those that are there.
    """

    def __init__(
        self, capture: Capture, outside: Sequence[torch.Tensor], programs: OrderedDict[Hashable, Program] | None = None
    ) -> None:
        self.capture = capture
        self.programs: OrderedDict[Hashable, Program] = OrderedDict() if programs is None else programs
        self._audited: OrderedDict[Hashable, int] = OrderedDict()
        self._outside = [BakedTensor(tensor) for tensor in outside]

    def holds(self, outside: Sequence[torch.Tensor]) -> bool:
        """Whether these are the tensors from outside of the step, and nothing was written to them."""
        same = len(outside) == len(self._outside) and all(map(lambda a, b: a.tensor is b, self._outside, outside))
        return same and all(one.is_whole() for one in self._outside)

    def of_others(self, outside: Sequence[torch.Tensor]) -> KeptGraph | None:
        """The graph for ops of the same digest that were given these tensors from outside, with the programs of this one.

        The tensors become constants of the graph, so that what is written to them will be seen. None where the digest does not
        have all of their values, or the graph has tensors from outside in another way.
        """
        before, capture = [one.tensor for one in self._outside], self.capture
        if len(before) != len(outside) or not all(map(_is_told, (*before, *outside))):
            return None
        now = {id(old): new for old, new in zip(before, outside, strict=True)}
        memory = {one.untyped_storage()._cdata for one in before}
        others = [*capture.untraced, *(one for one in capture.constants.values() if id(one) not in now)]
        if memory and any(one.untyped_storage()._cdata in memory for one in others):
            return None
        constants = {name: now.get(id(one), one) for name, one in capture.constants.items()}
        return KeptGraph(capture.with_constants(constants), outside, self.programs)

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
        program = self.programs.get(key)
        if program is not None:
            self.programs.move_to_end(key)
            return program, True
        program = self.programs[key] = make()
        if len(self.programs) > _PROGRAMS:
            self.programs.popitem(last=False)
        return program, False


_Graphs = OrderedDict[Hashable, KeptGraph]  # by what is known before a step's Python runs, and the digest of its ops
OF_ALL: _Graphs = OrderedDict()
"""The graphs that any module may take, last those that were used last."""


class ModuleGraphs:
    """The graphs of one module's steps."""

    def __init__(self) -> None:
        self._graphs: _Graphs = OrderedDict()

    def begin_run(self) -> RunGraphs:
        """The graphs as a run that begins now sees them."""
        return RunGraphs(self._graphs)


class RunGraphs:
    """The graphs of a module's steps in one of its runs: those of earlier runs, and of other modules, can be taken.

    Args:
        graphs: of the module.
    """

    def __init__(self, graphs: _Graphs) -> None:
        self._graphs = graphs
        self._earlier = {form for form, _ in (*graphs, *OF_ALL)}  # pyright: ignore[reportGeneralTypeIssues]

    def may_have(self, form: Hashable) -> bool:
        """Whether an earlier run had a step of this form."""
        return (form, settings()) in self._earlier

    def find(self, form: Hashable, digest: str, outside: Sequence[torch.Tensor], by_identity: bool) -> KeptGraph | None:
        """The graph of these ops, or None; for the arguments see :meth:`keep`."""
        key = ((form, settings()), digest)
        found = self._graphs.get(key)
        if found is not None and found.holds(outside):
            self._graphs.move_to_end(key)
            return found
        known = None if by_identity else OF_ALL.get(key)
        if known is None or (found := known.of_others(outside)) is None:
            return None
        _put(OF_ALL, key, known, _ANY_MODULE_S)
        _put(self._graphs, key, found, _GRAPHS)
        return found

    def stored(
        self, form: Hashable, digest: str, outside: Sequence[torch.Tensor], by_identity: bool, origins: Sequence[Origin]
    ) -> KeptGraph | None:
        """The graph of these ops that another process has stored, which is kept; for the arguments see :meth:`keep`.

        Args:
            origins: of the ops.
        """
        key = _key_of_stored(form, digest, outside, by_identity)
        graph = None if key is None else stored_graphs.read(key, outside, origins)
        return None if graph is None else self.keep(form, digest, outside, by_identity, graph)

    def store(
        self,
        form: Hashable,
        digest: str,
        outside: Sequence[torch.Tensor],
        by_identity: bool,
        origins: Sequence[Origin],
        capture: Capture,
    ) -> None:
        """Store a graph for other processes; for the arguments see :meth:`stored`."""
        key = _key_of_stored(form, digest, outside, by_identity)
        if key is not None and KeptGraph(capture, outside).of_others(outside) is not None:
            stored_graphs.write(key, capture, outside, origins)

    def keep(
        self, form: Hashable, digest: str, outside: Sequence[torch.Tensor], by_identity: bool, capture: Capture
    ) -> KeptGraph:
        """Keep a graph for later runs.

        Args:
            form: names and shapes of the step's inputs.
            digest: of the ops that ran (:class:`~xlatrain.bridge.capture.op_log.OpLog`).
            outside: the tensors that the ops were given and the step was not.
            by_identity: whether the digest tells objects by their ids, which others may have once these are gone.
            capture: the graph.
        """
        key, kept = ((form, settings()), digest), KeptGraph(capture, outside)
        _put(self._graphs, key, kept, _GRAPHS)
        if not by_identity and kept.of_others(outside) is not None:
            _put(OF_ALL, key, kept, _ANY_MODULE_S)
        return kept


def _key_of_stored(form: Hashable, digest: str, outside: Sequence[torch.Tensor], by_identity: bool) -> str | None:
    """The key of a graph on disk; None where another process would not know it."""
    if by_identity or jax.process_count() > 1 or not all(map(_is_told, outside)):
        return None
    try:
        return stored_graphs.key_of(told(form), told(settings()), digest, jax.default_backend())
    except NotToldError:
        return None


def _is_told(tensor: torch.Tensor) -> bool:
    """Whether the digest has all that ops can see of a tensor from outside: its values, which are all that is in its memory, in
    order, since ``as_strided`` sees what is beside them."""
    whole = bytes_of(tensor) is not None and tensor.is_contiguous() and not tensor.storage_offset()
    return whole and tensor.untyped_storage().nbytes() == tensor.nbytes <= SMALL and not (tensor.is_conj() or tensor.is_neg())


def _put(graphs: _Graphs, key: Hashable, graph: KeptGraph, most: int) -> None:
    graphs[key] = graph
    graphs.move_to_end(key)
    if len(graphs) > most:
        graphs.popitem(last=False)


def settings() -> Hashable:
    """The settings of the process by which equal ops may become another graph, or another program."""
    flags = (torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype(), torch.get_float32_matmul_precision())
    flags += (torch.backends.mkldnn.enabled,)
    names = sorted(name for name in os.environ if name.startswith(("XLATRAIN_", "XLA_")) and name not in OF_NO_PROGRAM)
    return (*flags, *((name, os.environ.get(name)) for name in names))


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
