"""Accelerators of 2.x: devices, availability, statistics, and a user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trainer
from torch_compat.accelerators import (
    Accelerator,
    AcceleratorRegistry,
    CPUAccelerator,
    CUDAAccelerator,
    XLAAccelerator,
    find_usable_cuda_devices,
)
from torch_compat.utilities.exceptions import MisconfigurationException


def test_cpus() -> None:
    assert CPUAccelerator.is_available() and CPUAccelerator.name() == "cpu"
    assert CPUAccelerator.auto_device_count() == 8 == CPUAccelerator.parse_devices("auto")
    assert CPUAccelerator.parse_devices("4") == 4
    assert CPUAccelerator.get_parallel_devices(2) == [torch.device("cpu")] * 2
    with pytest.raises(TypeError, match="an int > 0, found 0"):
        CPUAccelerator.parse_devices(0)
    assert set(CPUAccelerator().get_device_stats("cpu")) == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    with pytest.raises(MisconfigurationException, match="should be CPU, got cuda:0"):
        CPUAccelerator().setup_device(torch.device("cuda", 0))


@pytest.mark.parametrize("kind", [CUDAAccelerator, XLAAccelerator])
def test_absent_hardware_is_not_available(kind: type[Accelerator]) -> None:
    assert not kind.is_available() and kind.auto_device_count() == 0
    with pytest.raises(MisconfigurationException, match=r"there is no .* \[0\]; JAX sees 0 here"):
        kind.parse_devices([0])
    with pytest.raises(MisconfigurationException, match="not available"):
        trainer(accelerator=kind())


def test_no_gpus_are_usable() -> None:
    assert find_usable_cuda_devices(0) == []
    with pytest.raises(ValueError, match="JAX sees 0 GPUs"):
        find_usable_cuda_devices(1)


class Half(Accelerator):
    """A user's accelerator: half of the CPU devices."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices) // 2

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cpu")] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 4

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "half"

    def setup_device(self, device: torch.device) -> None:
        self.calls.append(f"setup_device {device}")

    def setup(self, trainer: Any, model: Any = None) -> None:
        self.calls.append("setup")

    def teardown(self) -> None:
        self.calls.append("teardown")


def test_a_users_accelerator_says_which_devices() -> None:
    half = Half()
    one = trainer(accelerator=half, devices=8)
    assert one.world_size == 4 and one.accelerator is half
    assert trainer(accelerator=Half(), devices="auto").world_size == 4
    one.fit(Net(), loader())
    assert half.calls == ["setup_device cpu", "setup", "teardown"]


def test_a_registered_accelerator_has_a_name() -> None:
    AcceleratorRegistry.register("half", Half)
    try:
        assert "half" in AcceleratorRegistry.available_accelerators()
        assert trainer(accelerator="half", devices=4).world_size == 2
    finally:
        AcceleratorRegistry.remove("half")
    with pytest.raises(MisconfigurationException, match="invalid accelerator name: `accelerator='half'`"):
        trainer(accelerator="half")
