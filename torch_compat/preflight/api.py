"""``preflight(trainer, module, …)``: from a Trainer and a module to a report."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from torch_compat.preflight.finder import FoundSteps, find_steps
from torch_compat.preflight.variation import Variation, checkpointable, repeated_layers, settings_of
from torch_compat.strategies import DDPStrategy, FSDPStrategy, MeshStrategy, SingleDeviceStrategy
from torch_compat.trainer.data.data_source import loaders_and_datamodule
from torch_compat.trainer.jax_modules import lightning_module
from torch_compat.utilities.wide_types import wide_types
from xlatrain.preflight import Topology
from xlatrain.preflight.examine import examine, first_estimate
from xlatrain.preflight.plan import BEST_PLAN, PLAN, write_plan
from xlatrain.preflight.report import Change, Report

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from xlatrain.step.jax_module import JaxModule

_OURS = (DDPStrategy, FSDPStrategy, MeshStrategy, SingleDeviceStrategy)


def preflight(
    trainer: Trainer,
    model: LightningModule | JaxModule,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    *,
    topology: str,
    num_slices: int = 1,
    output: str | os.PathLike[str] | None = None,
    suggest: bool = True,
    evaluation: bool = True,
    search_s: float | None = None,
    search_rules: Mapping[str, Sequence[tuple[str, PartitionSpec]]] | None = None,
    store: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Compile the first training and validation step of ``trainer.fit(model, …)`` for a pod that is not here.

    Hooks up to ``on_train_batch_start`` and ``on_validation_epoch_start`` are called as in a run, and one batch is loaded. No
    step runs, nothing is written but ``output``, and parameters made under ``trainer.init_module()`` or in ``configure_model``
    take no memory.

    Args:
        model, train_dataloaders, val_dataloaders, datamodule: as for ``fit``.
        topology: ``"v5e:16x16"``, ``"v5p:4x4x4"``, … or ``"cpu:8"``; it takes the place of the Trainer's ``accelerator``,
            ``devices`` and ``num_nodes``.
        num_slices: slices of that topology.
        output: folder for ``preflight.json``, ``preflight.html`` and ``plan.json``; after a search also ``best_plan.json``, the
            plan of what it ranks first.
        suggest: where it does not fit, try what might help, each by compiling it.
        evaluation: also compile the validation step.
        search_s: also compile other meshes, sharding rules, batches and recomputation for so many seconds; ``report.search``
            ranks them.
        search_rules: name → sharding rules (as of ``MeshStrategy``) that the search tries beside the strategy's own.
        store: also keep each program's StableHLO in ``output``, for the plan to name.
        progress: told what is done next.

    Raises:
        TopologyError: a topology that does not exist, or a mesh that does not match it.
        LibtpuError: the compiler is missing or of another version.
        PreflightError: the step cannot be captured, or needs values.
        ValueError: ``store`` without ``output``.
    """
    if store and output is None:
        raise ValueError("preflight(store=True) keeps programs in the folder output=…, which is not given")
    module = lightning_module(getattr(model, "_orig_mod", model))
    train_dataloaders, datamodule = loaders_and_datamodule(train_dataloaders, datamodule, val_dataloaders, "fit")
    examiner = Examiner(trainer, module, (train_dataloaders, val_dataloaders, datamodule), evaluation, progress)
    start = time.perf_counter()
    pod = Topology.parse(topology, num_slices)
    folder = None if output is None else Path(output)
    report = examiner.examine(pod, Variation(), store=folder if store else None)
    if not report.fits and suggest and search_s is None:
        report.changes = examiner.changes(pod, report)
    if search_s is not None:
        from torch_compat.preflight.search import Search

        searched = Search(examiner, pod, report, search_rules or {}, folder)
        report.search = searched.run(search_s)
        if folder is not None and (best := searched.best()) is not None:
            write_plan(best, folder / BEST_PLAN)
    report.seconds["total"] = round(time.perf_counter() - start, 3)
    if folder is not None:
        write_plan(report, report.save(folder).parent / PLAN)
    return report


@dataclass
class Examiner:
    """Examines one run on several topologies and in several variations."""

    trainer: Trainer
    module: LightningModule
    data: tuple[Any, Any, Any]
    evaluation: bool
    progress: Callable[[str], None]

    def examine(
        self, topology: Topology, variation: Variation, *, evaluation: bool | None = None, store: Path | None = None
    ) -> Report:
        """The report of one variation on one topology; ``store``: a folder to keep its programs in."""
        trainer = self.trainer
        devices = topology.devices()
        self.progress(f"setting up ({variation})" if variation != Variation() else "setting up")
        start = time.perf_counter()
        with wide_types(trainer._wide), variation.of(trainer, self.module, devices):
            if trainer.scaler is not None:
                trainer.scaler.init()
            wanted = self.evaluation if evaluation is None else evaluation
            configured = functools.partial(variation.of_module, self.module)
            found = find_steps(
                trainer,
                self.module,
                *self.data,
                evaluation=wanted,
                divide=variation.divide,
                configured=configured,
                placed=functools.partial(self._placed, topology),
            )
            captured = time.perf_counter() - start
            settings = settings_of(trainer, replace(variation, divide=1), dict(found.mesh.shape), found.rows)
            return self._report(topology, found, settings, captured, store)

    def _placed(self, topology: Topology, found: FoundSteps) -> None:
        """Tell what is known before anything is captured."""
        assert found.state is not None
        accumulate = self.trainer.accumulate_grad_batches
        for line in first_estimate(topology, found.mesh, found.state, found.batch, found.trainable, accumulate):
            self.progress(line)
        self.progress("tracing the steps")

    def _report(
        self, topology: Topology, found: FoundSteps, settings: dict[str, Any], captured: float, store: Path | None
    ) -> Report:
        assert found.state is not None
        report = examine(
            found.steps,
            topology=topology,
            mesh=found.mesh,
            state=found.state,
            batch=found.batch,
            trainable=found.trainable,
            accumulate=self.trainer.accumulate_grad_batches,
            loops=found.loops,
            attention=found.attention,
            notes=found.notes,
            settings=settings,
            store=store,
            progress=self.progress,
        )
        report.seconds = {"capture": round(captured, 3), **report.seconds}
        report.seconds["total"] = round(report.seconds["total"] + captured, 3)
        return report

    # -- what would help -------------------------------------------------------------------------------------------

    def changes(self, topology: Topology, report: Report) -> list[Change]:
        """Changes that were tried: each alone; if none is enough, those of the run together; last a larger topology."""
        single = list(self._candidates(topology, report))
        tried = [self._try(topology, one) for one in single]
        if not any(change.fits for change in tried) and len(single) > 1:
            combined = Variation(
                axes=next((one.axes for one in single if one.axes is not None), None),
                divide=max(one.divide for one in single),
                remat=any(one.remat for one in single),
                precision=next((one.precision for one in single if one.precision is not None), None),
            )
            tried.append(self._try(topology, combined))
        if (larger := _larger(topology)) is not None:
            tried.append(self._try(larger, Variation(), f"{larger.title}, {larger.chips} chips"))
        return tried

    def _candidates(self, topology: Topology, report: Report) -> Iterator[Variation]:
        devices = topology.chips * topology.devices_per_chip
        replicated = math.prod(size for axis, size in report.mesh.items() if axis == "data") > 1
        if replicated and type(self.trainer.strategy) in _OURS and "tensor" not in report.mesh:
            slices = topology.num_slices
            yield Variation(axes=(("data", slices), ("fsdp", devices // slices)))
        if checkpointable(self.module):
            yield Variation(remat=True)
        elif repeated_layers(self.module) and not self.trainer.strategy.remat:
            yield Variation(axes=tuple(report.mesh.items()), remat=True)
        rows = report.settings.get("global_batch_rows") or 0
        for divide in (2, 8):
            if rows >= divide * devices:
                yield Variation(divide=divide)
        if report.settings["precision"] == "32-true":
            yield Variation(precision="bf16-mixed")

    def _try(self, topology: Topology, variation: Variation, what: str | None = None) -> Change:
        what = what or str(variation)
        try:
            found = self.examine(topology, variation, evaluation=False)
        except Exception as error:  # a change that the module does not take is a finding too
            return Change(what, None, 0, f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300])
        return Change(what, found.fits, found.bytes_per_chip["total"])


def _larger(topology: Topology) -> Topology | None:
    """The same chips, twice as many; None where that is not offered."""
    if topology.chip is None:
        return None
    wanted = 2 * math.prod(topology.shape)
    shape = next((one for one in topology.chip.shapes() if math.prod(one) == wanted), None)
    if shape is None:
        return None
    return Topology.parse(f"{topology.chip.name}:{'x'.join(map(str, shape))}", topology.num_slices)
