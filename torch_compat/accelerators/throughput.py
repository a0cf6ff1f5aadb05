"""``Throughput``: samples, batches and floating-point operations per second, over a window of updates.

API: ``lightning.fabric.utilities.throughput``.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

import torch

from torch_compat.accelerators.jax_devices import local_devices
from torch_compat.utilities.flops import measure_flops
from torch_compat.utilities.rank_zero import rank_zero_only, rank_zero_warn
from xlatrain.xla.peak_flops import peak_flops

T = TypeVar("T", bound=float)

__all__ = ["Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]


class Throughput:
    """Computes throughput from running totals.

    Args:
        available_flops: peak FLOP/s of one device, for ``mfu``.
        world_size: number of devices; totals over all of them are given if there are several.
        window_size: how many updates rates are computed over.
        separator: between ``device`` and the name of a metric.

    Raises:
        ValueError: a window of less than 2 updates.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size}: expected the number of devices, at least 1")
        if window_size < 2:
            raise ValueError(f"window_size={window_size}: a rate needs at least 2 updates")
        self.available_flops = available_flops
        self.separator = separator
        self.world_size = world_size
        self._time = _Rising(window_size)
        self._batches = _Rising(window_size)
        self._samples = _Rising(window_size)
        self._lengths = _Rising(window_size)
        self._flops: deque[float] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: float, lengths: float | None = None, flops: float | None = None
    ) -> None:
        """Adds one update.

        Args:
            time: seconds since the start.
            batches: batches since the start.
            samples: samples of one device since the start.
            lengths: items (tokens, ...) of one device since the start.
            flops: operations of one device since the last update.

        Raises:
            ValueError: a total that does not grow, fewer samples than batches, or fewer items than samples.
            RuntimeError: ``lengths`` in some updates only.
        """
        self._time.append(time)
        if samples < batches:
            raise ValueError(f"Expected samples ({samples}) to be greater or equal than batches ({batches})")
        self._batches.append(batches)
        self._samples.append(samples)
        if lengths is not None:
            if lengths < samples:
                raise ValueError(f"Expected lengths ({lengths}) to be greater or equal than samples ({samples})")
            self._lengths.append(lengths)
            if len(self._samples) != len(self._lengths):
                raise RuntimeError(
                    f"If lengths are passed ({len(self._lengths)}), there needs to be the same number of samples"
                    f" ({len(self._samples)})"
                )
        if flops is not None:
            self._flops.append(flops * self.world_size)

    def compute(self) -> dict[str, float]:
        """Totals, and once the window is full the rates.

        Raises:
            IndexError: there was no update.
        """
        metrics: dict[str, float] = {"time": self._time[-1], "batches": self._batches[-1], "samples": self._samples[-1]}
        if self._lengths:
            metrics["lengths"] = self._lengths[-1]
        for name, totals in (("batches", self._batches), ("samples", self._samples), ("items", self._lengths)):
            if totals.is_full:
                self._add(metrics, name, totals.growth / self._time.growth)
        if len(self._flops) == self._flops.maxlen:
            rate = (sum(self._flops) - self._flops[0]) / self._time.growth / self.world_size
            self._add(metrics, "flops", rate)
            if self.available_flops:
                metrics[f"device{self.separator}mfu"] = rate / self.available_flops
        return metrics

    def _add(self, metrics: dict[str, float], name: str, rate: float) -> None:
        """The rate of one device, and of all."""
        metrics[f"device{self.separator}{name}_per_sec"] = rate
        if self.world_size > 1:
            metrics[f"{name}_per_sec"] = rate * self.world_size

    def reset(self) -> None:
        """Forgets all updates."""
        for window in (self._time, self._batches, self._samples, self._lengths, self._flops):
            window.clear()


class _Rising(deque[float]):
    """A window of the last values of a number that grows."""

    def __init__(self, size: int) -> None:
        super().__init__(maxlen=size)

    @property
    def is_full(self) -> bool:
        return len(self) == self.maxlen

    @property
    def growth(self) -> float:
        return self[-1] - self[0]

    def append(self, value: float) -> None:
        if self and value <= self[-1]:
            raise ValueError(f"Expected the value to increase, last: {self[-1]}, current: {value}")
        super().append(value)


class ThroughputMonitor(Throughput):
    """A :class:`Throughput` for loops with Fabric, which sends what it computes to Fabric's loggers.

    API: https://lightning.ai/docs/fabric/2.6.0/api/generated/lightning.fabric.utilities.throughput.ThroughputMonitor.html

    Args:
        fabric: whose devices count, and whose loggers are used.
        **kwargs: of :class:`Throughput`, but for ``available_flops`` and ``world_size``, which are Fabric's.

    Process 0 computes and logs; on others nothing is computed, and what is given back is empty.
    """

    def __init__(self, fabric: Any, **kwargs: Any) -> None:
        fabric._check_launched()
        available = peak_flops(fabric._mesh.mesh.devices.flat[0], _compute_dtype(fabric.strategy.precision))
        super().__init__(available_flops=available, world_size=fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1
        for name in ("update", "reset"):
            setattr(self, name, rank_zero_only(getattr(self, name)))
        for name in ("compute", "compute_and_log"):
            setattr(self, name, rank_zero_only(getattr(self, name), default={}))

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Compute the metrics, see :meth:`compute`, and send them to the loggers.

        Args:
            step: of the loggers; by default one more than the last.
            **kwargs: of :meth:`compute`.
        """
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> float | None:
    """Peak dense matrix FLOP/s of one GPU or TPU, or None where it is not known, as of a CPU.

    Args:
        device: ``cuda`` or ``xla``, by its index among the devices that JAX sees.
        dtype: what the matrices are multiplied in.
    """
    found = local_devices({"cuda": "gpu", "xla": "tpu"}.get(device.type, "")) if device.type != "cpu" else []
    index = device.index or 0
    if index >= len(found):
        return None
    flops = peak_flops(found[index], str(dtype).removeprefix("torch."))
    if flops is None:
        rank_zero_warn(f"FLOPs not found for {found[index].device_kind!r} in {dtype}: no `mfu` is computed")
    return flops


def _compute_dtype(precision: Any) -> str:
    name = precision.precision
    return {"bf16": "bfloat16", "16": "float16", "64": "float64"}.get(name.partition("-")[0], "float32")


def _plugin_to_compute_dtype(plugin: Any) -> torch.dtype:
    """The dtype that a precision plugin computes in.

    Raises:
        RuntimeError: no precision plugin.
    """
    if not hasattr(plugin, "precision"):
        raise RuntimeError(f"Expected a precision plugin, got {plugin}")
    return getattr(torch, _compute_dtype(plugin))
