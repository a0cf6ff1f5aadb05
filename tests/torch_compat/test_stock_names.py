"""Names that only stock's modules have: what they import, values, and classes that it deprecated or removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_compat
from torch_compat import accelerators, plugins, strategies
from torch_compat.stock_names.aliases import module_behind
from torch_compat.utilities.exceptions import MisconfigurationException


def of(module: str, name: str) -> Any:
    return getattr(module_behind(module), name)


def test_what_stocks_modules_import_or_compute() -> None:
    result = "lightning.pytorch.trainer.connectors.logger_connector.result"
    assert of(result, "_OUT_DICT") == dict[str, torch.Tensor]
    assert of(result, "Tensor") is torch.Tensor
    assert of("lightning.pytorch.core.saving", "get_filesystem") is of("lightning.fabric.utilities.cloud_io", "get_filesystem")
    assert of("lightning.fabric.strategies.ddp", "default_pg_timeout").total_seconds() == 1800
    assert of("lightning.pytorch", "cli_lightning_logo") is torch_compat.cli_lightning_logo  # pyright: ignore
    assert of("lightning", "Trainer") is torch_compat.Trainer


def test_functions_and_classes_of_stock_alone_raise_when_they_are_used() -> None:
    base = of("lightning.fabric.strategies.strategy", "_BackwardSyncControl")
    assert issubclass(of("lightning.fabric.strategies.ddp", "_DDPBackwardSyncControl"), base)
    sharded = of("lightning.fabric.strategies.strategy", "_Sharded")
    with pytest.raises(MisconfigurationException, match=r"^lightning\.fabric\.strategies\.strategy\._Sharded is not offered"):
        type("Mine", (sharded,), {})()
    with pytest.raises(MisconfigurationException, match=r"_setup_device_mesh is not offered on an XLA mesh: "):
        of("lightning.fabric.strategies.model_parallel", "_setup_device_mesh")(1, 2, 3, None)


def test_helpers_that_libraries_call() -> None:
    chosen: dict[str, Any] = {}
    for value in ({"a": 1, "b": 2}, 3):
        of("lightning.fabric.strategies.strategy", "_apply_filter")("k", {"k": lambda name, _: name == "b"}, value, chosen)
        assert chosen.pop("k") == ({"b": 2} if value != 3 else 3)
    with pytest.raises(KeyError, match="The requested state contains a key 'b' that does not exist in the loaded checkpoint"):
        of("lightning.fabric.strategies.strategy", "_validate_keys_for_strict_loading")(["a", "b"], {"a": 0}, strict=True)


def test_registries_have_stocks_names_and_entries() -> None:
    registry, of_fabric = strategies.StrategyRegistry, of("lightning.fabric.strategies", "STRATEGY_REGISTRY")
    both = {
        "ddp",
        "ddp_spawn",
        "ddp_fork",
        "ddp_notebook",
        "deepspeed_stage_3_offload_nvme",
        "fsdp_cpu_offload",
        "single_tpu",
        "xla",
    }
    assert both <= registry.keys() and both | {"dp", "xla_fsdp", "deepspeed_stage_1_offload"} <= of_fabric.keys()
    assert registry["ddp_find_unused_parameters_true"] == {
        "description": "DDP strategy with `find_unused_parameters` as True and `start_method` 'popen'",
        "init_params": {"find_unused_parameters": True, "start_method": "popen"},
        "strategy": strategies.DDPStrategy,
        "strategy_name": "ddp_find_unused_parameters_true",
    }
    assert accelerators.AcceleratorRegistry.available_accelerators() == {"cpu", "cuda", "mps", "tpu"}
    assert accelerators.AcceleratorRegistry["tpu"]["accelerator_name"] == "tpu"
    assert str(registry).startswith("Registered Strategies: ddp, ")
    for kind in (ValueError, MisconfigurationException):
        with pytest.raises(kind, match="'ddp' is already present in the registry"):
            registry.register("ddp", strategies.DDPStrategy)
    for name in ("deepspeed", "ddp_fork", "fsdp_cpu_offload"):
        for one in (registry, of_fabric):
            with pytest.raises(MisconfigurationException, match=r"is not (offered|supported)"):
                one.get(name)
    assert isinstance(registry.get("ddp_spawn"), strategies.DDPStrategy)


def test_deprecated_classes_are_their_successors_and_say_so() -> None:
    with pytest.warns(DeprecationWarning, match=r"^The `MixedPrecisionPlugin` is deprecated\. Use .*\.MixedPrecision` instead\."):
        made = plugins.MixedPrecisionPlugin("bf16-mixed", "cpu")  # pyright: ignore
    assert isinstance(made, plugins.MixedPrecision) and made.precision == "bf16-mixed"
    with pytest.warns(DeprecationWarning, match="^The `FSDPMixedPrecisionPlugin` is deprecated"):
        assert plugins.FSDPMixedPrecisionPlugin("bf16-mixed", "cpu").precision == "bf16-mixed"  # pyright: ignore
    with pytest.warns(DeprecationWarning, match=r"^The `TPUAccelerator` class is deprecated\. Use `lightning.pytorch"):
        assert isinstance(accelerators.TPUAccelerator(), accelerators.XLAAccelerator)  # pyright: ignore
    assert issubclass(strategies.SingleTPUStrategy, strategies.SingleDeviceXLAStrategy)  # pyright: ignore
    assert of("lightning.pytorch.accelerators.tpu", "TPUAccelerator") is accelerators.TPUAccelerator  # pyright: ignore


@pytest.mark.parametrize("name", ["HPUAccelerator", "HPUParallelStrategy", "HPUCheckpointIO", "HPUPrecisionPlugin"])
def test_removed_classes(name: str) -> None:
    removed = next(getattr(home, name) for home in (accelerators, strategies, plugins) if hasattr(home, name))
    for use in (removed, lambda: removed.setup(None)):
        with pytest.raises(NotImplementedError, match=f"^The `{name}` class has been removed: "):
            use()
