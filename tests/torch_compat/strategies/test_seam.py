"""Overrides of a user's Strategy are what the loops call, at the documented moment, with the compiled step kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trained, trainer, weights
from torch_compat.plugins import LayerSync, Precision
from torch_compat.strategies import DDPStrategy, FSDPStrategy, Strategy, StrategyRegistry
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")  # a fallback would be an error


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """The weights after one epoch without any plugin."""
    return weights(trained())


class Logging(DDPStrategy):
    """A logging plugin: writes down what is called."""

    NAMES = (
        "connect", "setup_environment", "setup", "model_to_device", "setup_optimizers", "setup_precision_plugin", "teardown",
        "process_dataloader", "on_reset_train_dataloader", "batch_to_device", "on_train_start", "on_train_batch_start",
        "pre_optimizer_step", "post_optimizer_step", "update_global_step", "post_training_step", "on_validation_start",
        "on_validation_end", "on_train_end", "lightning_module_state_dict", "optimizer_state", "save_checkpoint",
        "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict", "remove_checkpoint",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []


def _noting(name: str) -> Any:
    def member(self: Logging, *args: Any, **kwargs: Any) -> Any:
        self.called.append(name)
        return getattr(super(Logging, self), name)(*args, **kwargs)

    return member


for _name in Logging.NAMES:
    setattr(Logging, _name, _noting(_name))


def test_a_logging_strategy_sees_every_moment_in_order(expected: torch.Tensor, tmp_path: Any) -> None:
    strategy, net = Logging(), Net()
    one = trainer(strategy=strategy)
    one.fit(net, loader(), loader())
    batch = [
        "batch_to_device", "on_train_batch_start", "pre_optimizer_step", "post_training_step", "post_optimizer_step",
        "update_global_step",
    ]  # fmt: skip
    assert strategy.called == [
        "connect", "setup_environment", "setup", "model_to_device", "setup_optimizers", "setup_precision_plugin",
        "on_reset_train_dataloader", "process_dataloader", "process_dataloader", "on_train_start", *batch, *batch,
        "on_validation_start", "batch_to_device", "batch_to_device", "on_validation_end", "on_train_end", "teardown",
    ]  # fmt: skip
    assert torch.equal(weights(net), expected)
    strategy.called.clear()
    one.save_checkpoint(tmp_path / "a.ckpt")
    assert strategy.called == ["lightning_module_state_dict", "optimizer_state", "save_checkpoint"]
    strategy.called.clear()
    trainer(strategy=strategy, max_epochs=2).fit(again := Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert [name for name in strategy.called if "load_" in name] == [
        "load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict",
    ]  # fmt: skip
    assert not torch.equal(weights(again), expected)
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


class Backward(DDPStrategy):
    """Sees real losses and gradients around backward, and halves what is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.norms: list[float] = []

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        self.losses.append(float(closure_loss))

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().backward(closure_loss * 0.5, *args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        gradient = self.lightning_module.net.weight.grad
        self.norms.append(float(gradient.norm()))
        gradient.mul_(2)  # in place: counts


def test_backward_is_captured_and_its_hooks_see_and_change_real_values() -> None:
    strategy = Backward()
    net = trained(strategy=strategy)
    plain = Net()
    x, y = loader().dataset.tensors
    for step, rows in enumerate((slice(0, 16), slice(16, 32))):
        loss = torch.nn.functional.mse_loss(plain.net(x[rows]), y[rows])
        weight, bias = torch.autograd.grad(loss, [plain.net.weight, plain.net.bias])
        assert strategy.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert strategy.norms[step] == pytest.approx(float(weight.norm()) / 2, rel=1e-4)
        with torch.no_grad():
            plain.net.weight -= 0.1 * weight  # half the loss, twice the gradient
            plain.net.bias -= 0.1 * bias / 2
    torch.testing.assert_close(weights(net), weights(plain))


class ParameterServer(DDPStrategy):
    """Process 0 alone makes the update, and sends the new parameters to everybody."""

    steps = 0

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        loss = closure()
        new = None
        if self.is_global_zero:
            self.steps += 1
            new = {name: p.detach() - 0.1 * p.grad for name, p in self.lightning_module.named_parameters()}
        new = self.broadcast(new)
        with torch.no_grad():
            for name, parameter in self.lightning_module.named_parameters():
                parameter.copy_(new[name])
        return loss


def test_a_parameter_server_makes_the_update_itself(expected: torch.Tensor) -> None:
    strategy = ParameterServer()
    net = Net()
    one = trainer(strategy=strategy)
    one.fit(net, loader())
    assert (strategy.steps, one.global_step) == (2, 2)
    torch.testing.assert_close(weights(net), expected)


class Doubled(DDPStrategy):
    """Steps of its own, counters of its own, data of its own."""

    def training_step(self, batch: Any, *args: Any) -> Any:
        return 2 * self.lightning_module.training_step(batch, *args)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self.lightning_module.validation_step((batch[0], batch[1] * 0), *args)

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        return current_global_step + 10

    def process_dataloader(self, dataloader: Any) -> Any:
        return list(dataloader)[:1]

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        x, y = super().batch_to_device(batch, device, dataloader_idx)
        return x, y + 1


def test_steps_data_and_counters_of_a_strategy_count() -> None:
    net, plain = Net(), Net()
    one = trainer(strategy=Doubled())
    one.fit(net, loader(), loader())
    x, y = (part[:16] for part in loader().dataset.tensors)
    gradients = torch.autograd.grad(2 * torch.nn.functional.mse_loss(plain.net(x), y + 1), list(plain.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
        zero = torch.nn.functional.mse_loss(plain.net(x), y * 0)
    torch.testing.assert_close(weights(net), weights(plain))
    assert one.callback_metrics["val"] == pytest.approx(float(zero), rel=1e-5)
    assert one.global_step == 10


class ShardsTheRest(FSDPStrategy):
    """A sharding plugin: a mesh and rules of its own, and its own part of a checkpoint."""

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        return {"data": 2, "fsdp": n_devices // 2}

    def on_train_start(self) -> None:
        self.shards = self.placed.array("net.weight").sharding.shard_shape((1, 4))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().lightning_module_state_dict().items() if "bias" not in name}


def test_a_sharding_strategy_decides_the_mesh_and_the_checkpoint(expected: torch.Tensor, tmp_path: Any) -> None:
    strategy, net = ShardsTheRest(), Net()
    one = trainer(strategy=strategy)
    one.fit(net, loader())
    assert dict(strategy.mesh.shape) == {"data": 2, "fsdp": 4} and strategy.shards == (1, 1)
    torch.testing.assert_close(weights(net), expected)
    one.save_checkpoint(tmp_path / "a.ckpt")
    assert set(one.strategy.load_checkpoint(tmp_path / "a.ckpt")["state_dict"]) == {"net.weight"}


class Halving(Precision):
    """A precision plugin with clipping and an optimizer step of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        for parameter in self.main_params(optimizer):
            parameter.grad.mul_(clip_val)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        self.steps += 1
        return super().optimizer_step(optimizer, model, closure, **kwargs)


def test_a_precision_plugin_clips_and_steps_in_its_own_way(tmp_path: Any) -> None:
    precision, net = Halving(), Net()
    one = trainer(plugins=[precision], gradient_clip_val=0.5)
    one.fit(net, loader())
    assert precision.steps == 2
    torch.testing.assert_close(weights(net), weights(trained(Net(lr=0.05))))
    one.save_checkpoint(tmp_path / "a.ckpt")
    trainer(plugins=[again := Halving()], max_epochs=2).fit(Net(), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert again.steps == 4


class Renamed(LayerSync):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        self.calls.append("apply")
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        self.calls.append("revert")
        return model


def test_a_layer_sync_is_applied_and_reverted_once() -> None:
    sync = Renamed()
    trained(plugins=[sync])
    assert sync.calls == ["apply", "revert"]


def test_a_registered_strategy_has_a_name(expected: torch.Tensor) -> None:
    StrategyRegistry.register("logging_for_tests", Logging, description="a test's")
    try:
        one = trainer(strategy="logging_for_tests")
        assert type(one.strategy) is Logging and "logging_for_tests" in StrategyRegistry.available_strategies()
        with pytest.raises(MisconfigurationException, match="already present in the registry"):
            StrategyRegistry.register("logging_for_tests", Logging)
    finally:
        StrategyRegistry.remove("logging_for_tests")
    with pytest.raises(MisconfigurationException, match="invalid strategy name: `strategy='logging_for_tests'`"):
        trainer(strategy="logging_for_tests")


def test_nobody_pays_for_what_nobody_overrides() -> None:
    members = [name for name in dir(Strategy) if not name.startswith("_")]
    for strategy in (trainer().strategy, trainer(strategy="fsdp").strategy):
        assert [name for name in members if strategy.overrides(name)] == []
    assert [name for name in members if Logging().overrides(name)] == sorted(Logging.NAMES)


class Incomplete(Strategy):
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor


def test_a_strategy_that_lacks_an_abstract_member_says_which() -> None:
    with pytest.raises(TypeError, match=r"abstract.*model_to_device"):
        Incomplete()  # pyright: ignore[reportAbstractUsage]
