"""Fabric's Strategy of the documented page: a raw loop's calls, on one process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_compat.accelerators import CPUAccelerator
from torch_compat.fabric import Fabric
from torch_compat.fabric.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torch_compat.plugins import TorchCheckpointIO
from torch_compat.plugins.environments import LightningEnvironment
from torch_compat.utilities.exceptions import MisconfigurationException


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def test_a_raw_loop_equals_torch() -> None:
    strategy = DDPStrategy(accelerator=CPUAccelerator())
    strategy.setup_environment()
    (module, optimizer), (plain, its_own) = parts(), parts()
    ready, (prepared,) = strategy.setup_module_and_optimizers(module, [optimizer])
    x = strategy.batch_to_device({"x": torch.ones(4, 3)})["x"]
    for _ in range(2):
        loss = ready(x).square().sum()
        prepared.zero_grad()
        strategy.backward(loss, ready)
        norm = strategy.clip_gradients_norm(ready, prepared, 1.0)
        strategy.optimizer_step(prepared)
        its_own.zero_grad()
        plain(x).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        its_own.step()
        assert norm == expected
    torch.testing.assert_close(ready.weight, plain.weight)
    strategy.teardown()


def test_a_norm_that_is_not_finite_is_an_error_where_wanted() -> None:
    strategy, (module, optimizer) = SingleDeviceStrategy(), parts()
    module.weight.grad = torch.full((2, 3), float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        strategy.clip_gradients_norm(module, optimizer, 1.0)
    assert strategy.clip_gradients_norm(module, optimizer, 1.0, error_if_nonfinite=False) == float("inf")
    module.weight.grad = torch.full((2, 3), 3.0)
    strategy.clip_gradients_value(module, optimizer, 0.5)
    assert module.weight.grad.max() == 0.5


@pytest.mark.parametrize("io", [None, TorchCheckpointIO()])
def test_checkpoints_are_converted_filtered_and_restored_in_place(io: Any, tmp_path: Path) -> None:
    strategy, (module, optimizer) = DDPStrategy(checkpoint_io=io), parts()
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": module, "optimizer": optimizer, "step": 7}
    strategy.save_checkpoint(tmp_path / "a.ckpt", state, filter={"model": lambda name, value: name == "weight"})
    whole = strategy.load_checkpoint(tmp_path / "a.ckpt")
    assert set(whole) == {"model", "optimizer", "step"} and set(whole["model"]) == {"weight"}
    other, its = parts()
    target = {"model": other, "optimizer": its, "step": 0}
    with pytest.raises(RuntimeError, match="bias"):
        strategy.load_checkpoint(tmp_path / "a.ckpt", target)
    left = strategy.load_checkpoint(tmp_path / "a.ckpt", target, strict=False)
    assert left == {} and target["step"] == 7 and torch.equal(other.weight, module.weight)
    assert its.state_dict()["state"][0]["step"] == 1
    with pytest.raises(KeyError, match="key 'missing' that does not exist"):
        strategy.load_checkpoint(tmp_path / "a.ckpt", {"missing": 1})
    assert set(strategy.load_checkpoint(tmp_path / "a.ckpt", {"step": 0})) == {"model", "optimizer"}
    with pytest.raises(ValueError, match=r"filter has the keys \['nothing'\]"):
        strategy.save_checkpoint(tmp_path / "b.ckpt", state, filter={"nothing": lambda name, value: True})


def test_empty_init_leaves_values_for_a_load() -> None:
    strategy = SingleDeviceStrategy()
    torch.manual_seed(0)
    with strategy.module_init_context(empty_init=True):
        torch.nn.Linear(3, 2)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn)  # nothing was drawn for the layer
    with strategy.module_init_context():
        assert not torch.equal(torch.nn.Linear(3, 2).weight, torch.nn.Linear(3, 2).weight)


def test_an_incomplete_strategy_says_what_it_lacks() -> None:
    with pytest.raises(TypeError, match=r"abstract.*all_reduce"):
        type("Mine", (Strategy,), {"barrier": lambda self, name=None: None})()
    with pytest.raises(RuntimeError, match="has no accelerator"):
        SingleDeviceStrategy().setup_environment()


class World(LightningEnvironment):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        self.asked.append((num_devices, num_nodes))


def test_arguments_of_stocks_strategies(tmp_path: Path) -> None:
    """In stock's order; what they say is done, or refused by name."""
    world = World()
    strategy = DDPStrategy(None, None, world, None, None, None, timedelta(seconds=3), find_unused_parameters=True)
    fabric = Fabric(accelerator="cpu", devices=8, strategy=strategy)
    assert strategy.timeout_s == 3 and world.asked == [(8, 1)] and isinstance(strategy, ParallelStrategy)
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 8, "rank": 0}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(MisconfigurationException, match="DDPStrategy has its own cluster_environment; give one"):
        Fabric(accelerator="cpu", devices=8, strategy=DDPStrategy(cluster_environment=world), plugins=[World()])
    with pytest.raises(MisconfigurationException, match=r"start_method='fork'.*does not survive a fork"):
        DDPStrategy(start_method="fork")
    with pytest.raises(TypeError, match=r"unexpected arguments .'nonsense'."):
        DDPStrategy(nonsense=1)
    fabric = Fabric(accelerator="cpu", devices=8, strategy=FSDPStrategy(state_dict_type="full"))
    fabric.launch()
    model = fabric.setup_module(torch.nn.Linear(8, 8))
    model(torch.ones(8, 8))
    fabric.save(tmp_path / "whole.ckpt", {"model": model})
    stored = torch.load(tmp_path / "whole.ckpt", weights_only=True)["model"]
    torch.testing.assert_close(stored["weight"], model.weight.detach())


def test_a_name_gives_the_class_of_that_name() -> None:
    names = {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "single_device": SingleDeviceStrategy}
    assert {name: type(Fabric(accelerator="cpu", devices=1, strategy=name).strategy) for name in names} == names
