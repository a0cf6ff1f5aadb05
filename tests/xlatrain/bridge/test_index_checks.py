"""Indices out of range are found inside the program, and said as torch says it; those in range never are."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.xlatrain.bridge._compare import as_host
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.lower.index_checks import IndexFindings, finding, index_checks
from xlatrain.bridge.lower.interpret import lower

Op = Callable[[Tensor, Tensor], Any]

ROWS, CLASSES = 4, 10


def put(x: Tensor, i: Tensor) -> Tensor:
    y = x.clone()
    y[i] = 1.0
    return y


# Each takes x (4, 10) and indices (3,); the largest allowed, and whether negative ones are.
OPS: dict[str, tuple[Op, int, bool]] = {
    "embedding": (lambda x, i: F.embedding(i, x), ROWS, False),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:3], i), CLASSES, False),
    "cross_entropy, smoothed": (lambda x, i: F.cross_entropy(x[:3], i, label_smoothing=0.1), CLASSES, False),
    "nll_loss, weighted": (lambda x, i: F.nll_loss(x[:3], i, weight=x[0]), CLASSES, False),
    "one_hot": (lambda x, i: F.one_hot(i, CLASSES), CLASSES, False),
    "gather": (lambda x, i: x.gather(1, i[:, None]), CLASSES, False),
    "take": (lambda x, i: x.take(i), ROWS * CLASSES, True),
    "put": (lambda x, i: x.put(i, x[0, :3]), ROWS * CLASSES, True),
    "index": (lambda x, i: x[i], ROWS, True),
    "index of two dims": (lambda x, i: x[torch.arange(3), i], CLASSES, True),
    "index_put": (put, ROWS, True),
    "index_select": (lambda x, i: x.index_select(0, i), ROWS, False),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), ROWS, False),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:3]), ROWS, False),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), ROWS, True),
    "scatter": (lambda x, i: x.scatter(1, i[:, None], 1.0), CLASSES, False),
    "scatter_add": (lambda x, i: x.scatter_add(1, i[None], x[:1, :3]), CLASSES, False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(1, i[None], x[:1, :3], "amax"), CLASSES, False),
}


def found(captured: Capture, *tensors: Tensor, rolled: bool = False) -> Exception | None:
    """The error that the program of a captured function finds for these values."""
    checks, run = index_checks(captured), lower(captured, rolled=rolled)

    def program(arrays: list[Any]) -> list[jax.Array]:
        findings = IndexFindings(checks)
        run(arrays, None, findings)
        return findings.packed()[0]

    packed = jax.jit(program)([as_host(tensor) for tensor in tensors])
    if not packed:
        return None
    one = finding(checks, np.asarray(packed))
    return one[1] if one else None


@pytest.mark.parametrize("name", OPS)
def test_torch_and_the_program_refuse_the_same_indices(name: str) -> None:
    op, size, negative = OPS[name]
    x = torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(1))
    captured = capture(op, x, torch.zeros(3, dtype=torch.int64))
    for index in (0, size - 1, -1, -size, size, -size - 1, 70_000, -70_000):
        indices = torch.tensor([1, index, 2])
        try:
            op(x, indices)
            expected = None
        except (IndexError, RuntimeError) as error:
            expected = error
        assert (expected is None) == (-size * negative <= index < size)
        got = found(captured, x, indices)
        assert type(got) is type(expected), index
        assert name == "take" or _clause(got) == _clause(expected)  # torch's decomposition of take is another op


def _clause(error: Exception | None) -> str:
    """What is said, without the name of the overload that torch puts in front, and what it advises."""
    return re.sub(r"^index_\w+_?\(\): ", "", str(error)).split("\n")[0].removesuffix(".")


def test_what_is_ignored_is_no_class() -> None:
    x, labels = torch.rand(3, CLASSES), torch.tensor([1, -100, -7])
    captured = capture(lambda x, i: F.cross_entropy(x, i, ignore_index=-7), x, labels)
    assert found(captured, x, torch.tensor([1, -7, 2])) is None
    assert str(found(captured, x, labels)) == "Target -100 is out of bounds."


def test_indices_that_are_in_range_by_how_they_were_made_are_not_looked_at() -> None:
    def step(x: Tensor, i: Tensor) -> list[Tensor]:
        best, order = x.argmax(1), x.topk(3, 1).indices
        return [x[torch.arange(ROWS), best], x.gather(1, order), x[i.clamp(0, 3)], x.index_select(0, i % ROWS), x[x[:, 0].long()]]

    captured = capture(step, torch.rand(ROWS, CLASSES), torch.zeros(3, dtype=torch.int64))
    assert [check.index.op for check in index_checks(captured)] == ["index"]  # the last


@pytest.mark.parametrize("bad", [0, 2])
def test_a_loop_over_layers_finds_it_in_any_of_them(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")
    depth = 5

    def step(tables: list[Tensor], indices: list[Tensor]) -> list[Tensor]:
        x = tables[0][:3]
        for table, index in zip(tables, indices, strict=True):
            x = torch.tanh(x @ table) + table[index]
        return [x]

    tables = [torch.rand(CLASSES, CLASSES) for _ in range(depth)]
    indices = [torch.ones(3, dtype=torch.int64) for _ in range(depth)]
    captured = capture(step, tables, indices)
    assert captured.rolled.loops
    for rolled in (True, False):
        assert found(captured, *tables, *indices, rolled=rolled) is None
        wrong = [*indices]
        wrong[bad] = torch.tensor([0, CLASSES, 0])
        assert isinstance(found(captured, *tables, *wrong, rolled=rolled), IndexError)
