"""Where `DeviceStatsMonitor` has its numbers from; `fit_script.py` compares what it logs with Lightning."""

from __future__ import annotations

from types import SimpleNamespace

import jax

from torch_compat.callbacks.device_stats import cpu_stats, memory_stats


def test_host() -> None:
    stats = cpu_stats()
    assert set(stats) == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    assert 0 < stats["cpu_vm_percent"] <= 100


def test_devices() -> None:
    assert memory_stats(jax.local_devices()) == {}, "XLA keeps no count on CPU"
    tpus = [SimpleNamespace(platform="tpu", id=id, memory_stats=lambda id=id: {"bytes_in_use": 10 * id}) for id in (1, 2)]
    assert memory_stats(tpus) == {"bytes_in_use.tpu:1": 10, "bytes_in_use.tpu:2": 20}
