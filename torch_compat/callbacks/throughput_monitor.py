"""``ThroughputMonitor``: logs batches, samples, items and FLOPs per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import torch

from torch_compat.accelerators.throughput import Throughput
from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.log_interval import should_log
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.xla.peak_flops import peak_flops

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

_COMPUTED_IN = {
    "bf16": "bfloat16", "16": "float16", "32": "float32", "64": "float64",
    "int8": "int8", "float8": "float8_e4m3fn", "transformer": "float8_e4m3fn",
}  # fmt: skip


@dataclass
class _Stage:
    """Counts of a stage since it started."""

    throughput: Throughput
    start: float = 0.0
    batches: int = 0
    samples: float = 0
    lengths: float = 0

    def restart(self) -> None:
        self.throughput.reset()
        self.start = time.perf_counter()
        self.batches, self.samples, self.lengths = 0, 0, 0


class ThroughputMonitor(Callback):
    """Logs what ``Throughput`` computes, as ``<stage>/<metric>``, with the metrics of the steps that are logged.

    ``device/...`` metrics, ``samples`` and ``lengths`` are those of one device, the others those of all devices. Steps run ahead
    of the host; where metrics are logged the monitor waits for the devices, so that finished work is counted. Validation time
    does not count as training time.

    If the module has an attribute ``flops_per_batch`` (see ``lightning.fabric.utilities.throughput.measure_flops``: operations of
    one device's batch), ``flops_per_sec`` is logged, and ``device/mfu`` on devices whose peak is known (or given as
    ``available_flops``).

    Args:
        batch_size_fn: number of samples in a batch. It gets this process's rows.
        length_fn: number of items (tokens, ...) in a batch.
        kwargs: for ``Throughput``: ``window_size``, ``separator``, ``available_flops``.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.ThroughputMonitor.html
    """

    def __init__(self, batch_size_fn: Callable[[Any], int], length_fn: Callable[[Any], int] | None = None, **kwargs: Any) -> None:
        super().__init__()
        Throughput(**kwargs)  # a wrong argument is an error here
        self.kwargs = kwargs
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self._stages: dict[str, _Stage] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        dtype = _COMPUTED_IN.get(trainer.precision.partition("-")[0], "float32")
        options = {"available_flops": peak_flops(trainer.strategy.mesh.devices.flat[0], dtype), **self.kwargs}
        names = ("train", "validate") if stage == "fit" else (stage,)
        for name in names:  # counts outlive a run
            throughput = Throughput(world_size=trainer.world_size, **options)
            before = self._stages.get(name)
            self._stages[name] = _Stage(throughput) if before is None else replace(before, throughput=throughput)
        if stage == "fit" and not hasattr(pl_module, "flops_per_batch"):
            rank_zero_warn(
                "When using the `ThroughputMonitor`, you need to define a `flops_per_batch` attribute or property in"
                f" {type(pl_module).__name__}: without it there is no flops per second and no utilization."
            )

    def _update(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *, log: bool) -> None:
        stage = self._stages[_stage_of(trainer)]
        if log and trainer.strategy.placed is not None:
            jax.block_until_ready(trainer.strategy.placed.state.draws)
        elapsed = time.perf_counter() - stage.start
        stage.batches += 1
        stage.samples += _share(self.batch_size_fn(batch), trainer.num_devices)
        if self.length_fn is not None:
            stage.lengths += _share(self.length_fn(batch), trainer.num_devices)
        stage.throughput.update(
            time=elapsed,
            batches=stage.batches,
            samples=stage.samples,
            lengths=None if self.length_fn is None else stage.lengths,
            flops=getattr(pl_module, "flops_per_batch", None),
        )

    def _log(self, trainer: Trainer, step: int | None = None) -> None:
        name = _stage_of(trainer)
        throughput = self._stages[name].throughput
        computed = {f"{name}{throughput.separator}{key}": value for key, value in throughput.compute().items()}
        tensors = {
            key: torch.tensor(value, dtype=None if isinstance(value, int) else torch.float64) for key, value in computed.items()
        }
        trainer.metric_log.send(tensors, step)

    # -- training ------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._stages["train"].restart()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        # Only whole optimizer steps are logged, so that their time is in.
        due = trainer.metric_log.is_due() and not trainer.fit_loop.accumulates()
        self._update(trainer, pl_module, batch, log=due)
        if due:
            self._log(trainer)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if trainer.sanity_checking:
            return
        stage = _stage_of(trainer)
        loop = {"validate": trainer.validate_loop, "test": trainer.test_loop}.get(stage, trainer.predict_loop)
        progress = loop.batch_progress
        due = should_log(trainer, progress.current.ready - 1)
        self._update(trainer, pl_module, batch, log=due)
        if due:
            self._log(trainer, progress.total.ready)

    def _start(self, trainer: Trainer) -> None:
        """Count from zero in ``fit``, and go on counting in another ``validate``, ``test`` or ``predict``."""
        stage = self._stages[_stage_of(trainer)]
        if trainer.state.fn == "fit" or not stage.batches:
            stage.restart()
        stage.start = time.perf_counter()

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._start(trainer)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        self._evaluate(trainer, pl_module, batch)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._stages["train"].start += time.perf_counter() - self._stages["validate"].start

    def on_test_start(self, trainer: Trainer, *_: Any) -> None:
        self._start(trainer)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        self._evaluate(trainer, pl_module, batch)

    def on_predict_start(self, trainer: Trainer, *_: Any) -> None:
        self._start(trainer)

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        self._evaluate(trainer, pl_module, batch)


def _stage_of(trainer: Trainer) -> str:
    assert trainer.state.stage is not None
    return trainer.state.stage.value


def _share(total: float, devices: int) -> float:
    """The share of one device; whole numbers stay whole where they can."""
    return total // devices if isinstance(total, int) and total % devices == 0 else total / devices
