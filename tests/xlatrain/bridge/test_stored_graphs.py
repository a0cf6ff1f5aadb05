"""Graphs that another process has stored, and kinds of ops that it has found: a run makes of them what it would make itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from xlatrain.bridge.capture import torchs_own
from xlatrain.bridge.capture.capture import Capture, Recording, capture, record
from xlatrain.bridge.capture.op_log import OpLog
from xlatrain.bridge.capture.recorded import kinds
from xlatrain.bridge.capture.recorded.kinds import KindTable
from xlatrain.bridge.lower import registry, stored_graphs
from xlatrain.bridge.lower.graph_text import graph_digest, graph_text
from xlatrain.bridge.lower.interpret import lower
from xlatrain.xla import kept_files

X, LABELS = torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1, 3])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def trained(x: torch.Tensor, weight: torch.Tensor) -> Any:
    hidden = x
    for _ in range(3):
        hidden = torch.relu(F.layer_norm(hidden @ weight, (4,))) * WEIGHTS
    loss = F.cross_entropy(hidden, LABELS, reduction="none").mean()
    return {"loss": loss, "grads": list(torch.autograd.grad(loss, [weight])), "none": None}


def written(x: torch.Tensor) -> Any:
    x = x.clone()
    x[0, 1:].add_(2)
    x.t_()
    return x, [x.max(0).indices, x.split(2)[1]]


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "trained": (trained, (X, torch.eye(4).requires_grad_())),
    "written": (written, (X,)),
    "draws": (lambda x: F.dropout(x, 0.5) + torch.rand_like(x) + x.clone().bernoulli_(0.5), (X,)),
    "strides": (lambda x: (x.t() * 2, x[:, ::2].expand(2, 3, 2)), (X,)),
    "half": (lambda x: torch.autocast("cpu", torch.bfloat16)(torch.mm)(x, x.t()), (X,)),
    "nothing": (lambda x: (), (X,)),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept_files, "_folder", tmp_path)
    forget_kinds(monkeypatch)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is of no use.*")
        yield tmp_path


def forget_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another process."""
    monkeypatch.setattr(kinds, "_shared", KindTable())


def recorded(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Recording, list[torch.Tensor]]:
    outside: list[torch.Tensor] = []

    def logged(*args: torch.Tensor) -> Any:
        with OpLog(args) as log:
            result = function(*args)
        outside.extend(log.outside)
        return result

    return record(logged, *args), outside


def again(folder: Path, function: Callable[..., Any], *args: torch.Tensor) -> tuple[Capture, Capture | None, Recording]:
    """The graph of a run; the one that another run finds stored; and that run."""
    recording, outside = recorded(function, *args)
    graph, key = recording.graph(), stored_graphs.key_of("test")
    assert key is not None
    stored_graphs.write(key, graph, outside, recording.origins)
    other, outside = recorded(function, *args)
    return graph, stored_graphs.read(key, outside, other.origins), other


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_stored_graph_is_the_graph(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args = FUNCTIONS[name]
    graph, found, other = again(folder, function, *args)
    assert found is not None
    own = other.graph()
    for one in (graph, own):
        assert (found.code, graph_text(found), found.source()) == (one.code, graph_text(one), one.source())
        assert (found.inputs, found.outputs, found.result, found.uses_random) == (
            one.inputs,
            one.outputs,
            one.result,
            one.uses_random,
        )
        assert found.constants.keys() == one.constants.keys()
    assert all(found.constants[name] is own.constants[name] for name in found.constants)
    assert found.rolled.loops == own.rolled.loops
    assert graph_digest(found) == graph_digest(own)
    if not found.uses_random:
        arrays = [one.detach().numpy() for one in args]
        for one, expected in zip(lower(found)(arrays, None), lower(own)(arrays, None), strict=True):
            assert one.tolist() == expected.tolist()
        found.graph(*args)  # its code runs


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kinds_of_another_process_make_the_same_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, args = FUNCTIONS[name]
    first = record(function, *args).graph()
    kept = list(folder.glob("xlatrain-kinds-*"))
    assert len(kept) == (name != "nothing")
    forget_kinds(monkeypatch)
    learned: list[Any] = []
    learn = kinds.Kind.learn
    monkeypatch.setattr(kinds.Kind, "learn", lambda *args: (learned.append(args[0].facts.name), learn(*args)))
    changed = {path: path.stat().st_mtime_ns for path in kept}
    second = record(function, *args).graph()
    assert learned == []
    assert {path: path.stat().st_mtime_ns for path in kept} == changed
    assert (first.code, graph_text(first)) == (second.code, graph_text(second))
    forget_kinds(monkeypatch)
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        third = record(function, *args).graph()
    assert len(told) == len(kept)
    assert bool(learned) == bool(kept)
    assert first.code == third.code


def test_kinds_differ_by_all_that_ops_depend_on(folder: Path) -> None:
    """What one run finds is not taken by one in which ops give something else."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.full((2,), 1.5) * torch.arange(2) / 3

    def looks() -> list[Any]:
        return [(one.shape, one.dtype, one.strides) for one in record(function, X).graph().outputs]

    plain = looks()
    torch.set_default_dtype(torch.float64)
    try:
        assert looks() == [(one.shape, one.dtype, one.strides) for one in capture(function, X).outputs] != plain
    finally:
        torch.set_default_dtype(torch.float32)
    assert looks() == plain
    strided = [record(lambda x: x * 2, one).graph().outputs[0].strides for one in (X, X.t().contiguous().t(), X)]
    assert strided[0] == strided[2] != strided[1]
    needs = [record(lambda x: x * 2, one).graph().outputs for one in (X, X.clone().requires_grad_())]
    assert needs[0] == needs[1]


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel.*")
def test_what_torch_gives_itself_is_of_all_runs() -> None:
    torch.vmap(torch.sin)(X)  # the first call in a process registers kernels for ops of ATen
    assert any(key.endswith("/FuncTorchBatched") for key in torch.library._impls)
    assert torchs_own.kernels_are_torchs()


def test_what_users_give_torch_is_of_one_run(folder: Path) -> None:
    """Kernels, decompositions and modes of the user's: nothing is stored, and nothing that is stored is taken."""
    record(lambda x: torch.tanh(x), X)
    assert stored_graphs.key_of("test") is not None
    assert kinds.table_of_run() is kinds._shared
    library = torch.library.Library("aten", "IMPL")
    library.impl("tanh", lambda x: x.new_empty((7,)), "CompositeExplicitAutograd")
    try:
        assert stored_graphs.key_of("test") is None
        assert kinds.table_of_run() is not kinds._shared
        record(lambda x: torch.tanh(x), X)
    finally:
        library._destroy()
    assert stored_graphs.key_of("test") is not None

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        assert stored_graphs.key_of("test") is None
        assert kinds.table_of_run() is not kinds._shared
    table = torchs_own.global_decomposition_table["post_autograd"]
    op = torch.ops.aten.lu_unpack.default
    assert op not in table
    table[op] = lambda x: x
    try:
        assert stored_graphs.key_of("test") is None
    finally:
        del table[op]
    assert stored_graphs.key_of("test") is not None
    ours = torch.ops.aten.tanh.default.py_kernels
    ours[torch._C.DispatchKey.CompositeImplicitAutograd] = lambda x: x
    try:
        assert not torchs_own.implementations_are_torchs([torch.ops.aten.tanh.default])
    finally:
        del ours[torch._C.DispatchKey.CompositeImplicitAutograd]
    assert torchs_own.implementations_are_torchs([torch.ops.aten.tanh.default])


def test_what_is_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.library.define("xlatrain_stored::scaled", "(Tensor x) -> Tensor")
    torch.library.register_fake("xlatrain_stored::scaled", torch.empty_like)
    record(torch.ops.xlatrain_stored.scaled, X)
    assert again(folder, torch.ops.xlatrain_stored.scaled, X)[1] is None  # an op of others
    assert not list(folder.glob("xlatrain-graph-*"))
    assert not [path for path in folder.glob("xlatrain-kinds-*") if b"xlatrain_stored" in path.read_bytes()]
    assert again(folder, lambda x: x + 1, X)[1] is not None
    monkeypatch.setitem(registry._TABLE, torch.ops.xlatrain_stored.scaled.default, lambda x: x)
    assert again(folder, lambda x: x + 1, X)[1] is None  # somebody adds lowerings
