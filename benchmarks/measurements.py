"""The measurements: each gives rows of the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.processes import run_script

EQUAL_MATHS = 1e-3
"""Losses of two ways to do the same step may deviate by this much (relative) over a run; more means other maths."""


@dataclass(frozen=True)
class Row:
    """A line of the table: ``value`` is what ``target`` is about; the rest says where it comes from."""

    what: str
    value: str
    target: str
    met: bool | None
    detail: str

    @property
    def is_ratio(self) -> bool:
        return self.value.endswith(" x")

    @property
    def ratio(self) -> float:
        return float(self.value.removesuffix(" x"))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def step_times(steps: int) -> Iterator[Row]:
    """Compiled steps against hand-written JAX and eager torch, interleaved in one process; stock Lightning beside it."""
    for name in ("gpt", "cnn"):
        flags = ("--steps", str(steps))
        stock_before = run_script(name, *flags, stock=True)["median_ms"]["trainer"]
        ours = run_script(name, *flags, "--lanes", "jax", "torch")
        stock_after = run_script(name, *flags, stock=True)["median_ms"]["trainer"]
        require_equal_maths(name, ours["loss_deviation"])
        medians = ours["median_ms"]
        yield from rows_of_steps(name.upper(), medians, statistics.mean([stock_before, stock_after]))


def rows_of_steps(name: str, medians: dict[str, float], stock: float) -> Iterator[Row]:
    trainer, jax, torch = medians["trainer"], medians["jax"], medians["torch"]
    detail = f"{trainer:.1f} against {jax:.1f} ms, interleaved"
    yield Row(f"{name} step / hand-written JAX", f"{trainer / jax:.3f} x", "<= 1.03 x", trainer / jax <= 1.03, detail)
    detail = f"{torch:.1f} against {trainer:.1f} ms, interleaved"
    yield Row(f"{name} speed / eager torch", f"{torch / trainer:.2f} x", "", None, detail)
    detail = f"{stock:.1f} ms in a process of its own, before and after"
    yield Row(f"{name} speed / stock Lightning eager", f"{stock / trainer:.2f} x", ">= 1.00 x", stock >= trainer, detail)


def require_equal_maths(name: str, deviations: dict[str, float]) -> None:
    worst = max(deviations.values())
    if worst > EQUAL_MATHS:
        raise RuntimeError(f"benchmark {name}: the losses of the compared steps deviate by {worst:.1e}: {deviations}")


def host_cost(steps: int) -> Iterator[Row]:
    """Host microseconds per step above a bare jitted JAX loop over the same DataLoader: of a dataset of the user's own class, of
    which rows are loaded one by one, and of a ``TensorDataset``, of which the Trainer takes a batch at once."""
    for name, dataset in (("a Dataset class", "rows"), ("TensorDataset", "tensors")):
        flags = ("--steps", str(steps), "--lanes", "jax", "--dataset", dataset)
        ours = run_script("tiny", *flags)["median_us"]
        stock = run_script("tiny", *flags, stock=True)["median_us"]
        above = ours["trainer"] - ours["jax"]
        detail = f"{ours['trainer']:.0f} against {ours['jax']:.0f} us, interleaved epochs"
        yield Row(f"host cost above bare JAX, {name}", f"{above:.0f} us", "<= 60 us", above <= 60, detail)
        detail = f"{stock['trainer']:.0f} against {stock['jax']:.0f} us, a process of its own"
        yield Row("  the same for stock Lightning", f"{stock['trainer'] - stock['jax']:.0f} us", "", None, detail)


def purity(steps: int) -> Iterator[Row]:
    """Host microseconds per step of the check that a captured step is still right for today's host values."""
    for name, microseconds in run_script("purity", "--steps", str(steps)).items():
        yield Row(f"purity check: {name}", f"{microseconds:.1f} us", "<= 20 us", microseconds <= 20, "median, in the Trainer")


def depth() -> Iterator[Row]:
    """Seconds until the first step of a new model is done, by the number of layers; processor time first."""
    kinds = {
        "as a loop": {"XLATRAIN_ROLL_LAYERS": "8"},
        "unrolled": {"XLATRAIN_ROLL_LAYERS": "off"},
    }
    for kind, settings in kinds.items():
        yield from rows_of_depth(f"first step, layers {kind}", run_script("depth", settings=settings))
    # 128 layers written out, as one program, take XLA 24 GiB to compile: it is killed where there is less
    yield from rows_of_depth(
        "first step, hand-written JAX", run_script("depth", "--lane", "jax", "--layers", "8", "32", stock=True)
    )


def single_ops() -> Iterator[Row]:
    """Processor time of single ops on one core: what is XLA:CPU's own."""
    for name, times in run_script("ops", stock=True, one_core=True).items():
        detail = f"{times['xla']:.2f} against {times['torch']:.2f} ms"
        yield Row(name, f"{times['xla'] / times['torch']:.2f} x", "", None, detail)


def rows_of_depth(what: str, seconds: dict[str, dict[str, float]]) -> Iterator[Row]:
    for n_layers, times in seconds.items():
        yield Row(f"{what}: {n_layers}", f"{times['cpu_s']:.1f} cpu s", "", None, f"{times['wall_s']:.1f} s by the clock")
