"""``SpikeDetection``: ends training when the loss jumps. API: ``lightning.fabric.utilities.spike``."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import torch


class TrainingSpikeException(RuntimeError):
    """The loss jumped.

    Args:
        batch_idx: index of the batch.
    """

    def __init__(self, batch_idx: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(f"Training spike detected in batch {batch_idx}", *args, **kwargs)
        self.batch_idx = batch_idx


class SpikeDetection:
    """Compares each loss with the mean of the losses before, and raises ``TrainingSpikeException`` if it is much worse.

    The indices of that batch and the one before, which may have spoilt the weights, are written to a file, to be left out when
    training is resumed. The loss of every batch is read, so the host waits for every step.

    Args:
        mode: "min" for losses, "max" for what is to grow.
        window: how many losses the mean is over.
        warmup: batches before the first check.
        atol: a change of less than this is no spike; None for no such limit.
        rtol: a change of less than ``rtol`` times the mean is no spike; None for no such limit.
        exclude_batches_path: the file, or its directory (then ``skip_batches.json``); default: the working directory.
        finite_only: a loss that is not finite is a spike.

    API: https://lightning.ai/docs/fabric/2.6.0/api/generated/lightning.fabric.utilities.spike.SpikeDetection.html
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"Invalid mode. Has to be min or max, found {mode}")
        self.last_val: torch.Tensor | float = 0.0
        from torchmetrics import MeanMetric
        from torchmetrics.wrappers import Running

        # Spikes are found on each process by itself, so the mean is not synchronised.
        self.running_mean = Running(MeanMetric(dist_sync_on_step=False, sync_on_compute=False), window=window)
        self.mode = mode
        self.warmup = warmup
        self.atol = atol
        self.rtol = rtol
        self.bad_batches: list[int] = []
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only

    @torch.no_grad()
    def on_train_batch_end(self, fabric: Any, loss: torch.Tensor, batch: Any, batch_idx: int) -> None:
        """Looks at the loss of a batch; ``fabric`` is a Fabric or a Trainer.

        Raises:
            TrainingSpikeException: it jumped, on this or another process.
        """
        is_spike = batch_idx >= self.warmup and self._is_spike(loss)
        fabric.strategy.barrier()
        if fabric.strategy.reduce_boolean_decision(is_spike, all=False):
            self._handle_spike(fabric, batch_idx)
        finite = bool(torch.isfinite(loss).all())
        if self.finite_only or fabric.strategy.reduce_boolean_decision(finite, all=True):
            self.running_mean.update(loss)
            self.last_val = loss

    def _is_spike(self, loss: torch.Tensor) -> bool:
        if self.finite_only and not torch.isfinite(loss).all():
            return True
        change = loss - self.last_val
        if bool((change <= 0).all() if self.mode == "min" else (change >= 0).all()):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing was added yet
            mean = self.running_mean.compute()
        distance = (loss - mean).abs()
        above_atol = self.atol is None or bool((distance >= abs(self.atol)).all())
        above_rtol = self.rtol is None or bool((distance >= (self.rtol * mean).abs()).all())
        return above_atol and above_rtol

    def _handle_spike(self, fabric: Any, batch_idx: int) -> None:
        self.bad_batches += [batch_idx - 1, batch_idx]
        if fabric.global_rank == 0:
            path = self._path()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.bad_batches, indent=4))
        raise TrainingSpikeException(batch_idx=batch_idx)

    def _path(self) -> Path:
        path = Path(self.exclude_batches_path or os.getcwd())
        self.exclude_batches_path = path if path.suffix == ".json" else path / "skip_batches.json"
        return self.exclude_batches_path

    def state_dict(self) -> dict[str, Any]:
        """The state that ``load_state_dict`` continues from."""
        return {
            "last_val": self.last_val.item() if isinstance(self.last_val, torch.Tensor) else self.last_val,
            "mode": self.mode,
            "warmup": self.warmup,
            "atol": self.atol,
            "rtol": self.rtol,
            "bad_batches": self.bad_batches,
            "bad_batches_path": None if self.exclude_batches_path is None else str(self.exclude_batches_path),
            "running": self.running_mean.state_dict(),
            "mean": self.running_mean.base_metric.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from a state."""
        state = dict(state_dict)
        self.running_mean.load_state_dict(state.pop("running"))
        self.running_mean.base_metric.load_state_dict(state.pop("mean"))
        self.last_val = state["last_val"]
        self.mode = state["mode"]
        self.warmup = state["warmup"]
        self.atol = state["atol"]
        self.rtol = state["rtol"]
        self.bad_batches = state["bad_batches"]
        self.exclude_batches_path = state["bad_batches_path"]
