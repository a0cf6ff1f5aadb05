"""Objects that keep what they hold in C: steps that change one are eager before they do, those that make their own are not."""

from __future__ import annotations

import csv
import ctypes
import functools
import hashlib
import io
import mmap
import queue
import sqlite3
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from basics import Regression, regression_data
from recording import Run, case
from torch import Tensor

ELEMENT = ET.Element("steps")


class Changing(Regression):
    """A step that changes an object of the host's, which a hook looks at."""

    def __init__(self, kept: Any, change: Callable[[Any], Any], look: Callable[[Any], Any], *, validates: bool = False) -> None:
        super().__init__()
        self.kept = kept
        self.change, self.look, self.validates = change, look, validates
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.validates:
            self.change(self.kept)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.validates:
            self.change(self.kept)
        return super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.look(self.kept))


def fit(run: Run, name: str, model: Changing) -> None:
    data = run.loader(*regression_data(48))
    run.fit(model, run.trainer(max_epochs=2), data, data if model.validates else None)
    run.note(name, [str(one) for one in model.seen])


def in_a_table() -> sqlite3.Connection:
    found = sqlite3.connect(":memory:", check_same_thread=False)
    found.execute("create table steps (step)")
    return found


def counted(memory: Any) -> None:
    memory[0] += 1


def pointed(pointer: Any) -> None:
    pointer.contents.value += 1


def counted_by_name(element: Any) -> None:
    element.set("count", str(int(element.get("count", "0")) + 1))


@case
def changes_objects_that_are_kept_in_c(run: Run) -> None:
    text = io.StringIO()
    kinds: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
        "hash": (hashlib.sha256(), lambda one: one.update(b"x"), lambda one: one.hexdigest()),
        "hash in a list": ([hashlib.md5()], lambda one: one[0].update(b"x"), lambda one: one[0].hexdigest()),
        "compressor": (zlib.compressobj(), lambda one: one.compress(b"hello"), lambda one: len(one.copy().flush())),
        "queue": (queue.SimpleQueue(), lambda one: one.put(1), lambda one: one.qsize()),
        "memory": (mmap.mmap(-1, 8), counted, lambda one: one[0]),
        "pointer": (ctypes.pointer(ctypes.c_int(1)), pointed, lambda one: one[0]),
        "rows": (csv.writer(text), lambda one: one.writerow([1]), lambda one: text.getvalue()),
        "rows by name": (csv.DictWriter(text, ["a"]), lambda one: one.writerow({"a": 1}), lambda one: text.getvalue()),
        "table": (in_a_table(), lambda one: one.execute("insert into steps values (1)"), lambda one: one.total_changes),
        "element": (ELEMENT, lambda one: ET.SubElement(one, "step"), lambda one: len(one)),
        "attribute of an element": (ELEMENT, counted_by_name, lambda one: ET.tostring(one)),
        "seeds": (np.random.SeedSequence(3), lambda one: one.spawn(1), lambda one: one.n_children_spawned),
        "file": (
            io.TextIOWrapper(io.BytesIO(), write_through=True),
            lambda one: one.write("a"),
            lambda one: one.buffer.getvalue(),
        ),
    }
    for name, one in kinds.items():
        fit(run, name, Changing(*one))


@case
def changes_a_hash_in_validation(run: Run) -> None:
    fit(run, "hash", Changing(hashlib.sha256(), lambda one: one.update(b"x"), lambda one: one.hexdigest(), validates=True))


def described(kept: Any) -> None:
    made, text, table = hashlib.sha256(), io.StringIO(), ET.Element("step")
    made.update(b"a")
    rows = csv.writer(text)
    rows.writerow([1, 2])
    ET.SubElement(table, "a").text = "b"
    packed = zlib.compressobj()
    kept.append(f"{made.hexdigest()} {text.getvalue()} {ET.tostring(table)!r} {len(packed.compress(b'ab') + packed.flush())}")


@case
def makes_objects_that_are_kept_in_c(run: Run) -> None:
    fit(run, "made", Changing([], described, lambda one: list(one)))


def advanced(draws: np.random.PCG64) -> None:
    draws.random_raw()


def one_more(record: np.void) -> None:
    record["a"] += 1


class Matrix:
    """As a matrix of a package's keeps its values."""

    def __init__(self) -> None:
        self.data = np.ones(2)


@functools.lru_cache
def tallies() -> list[int]:
    return [0]


def tallied(_: Any) -> None:
    tallies()[0] += 1


@case
def changes_what_numpy_and_caches_keep(run: Run) -> None:
    def doubled(matrix: Any) -> None:
        matrix.data += 1

    fit(run, "bits", Changing(np.random.PCG64(3), advanced, lambda one: one.state["state"]["state"]))
    fit(run, "record", Changing(np.zeros(2, dtype=[("a", int), ("b", float)])[0], one_more, lambda one: one.tolist()))
    fit(run, "in place", Changing(Matrix(), doubled, lambda one: one.data.tolist()))
    fit(run, "cached", Changing(None, tallied, lambda one: list(tallies())))
