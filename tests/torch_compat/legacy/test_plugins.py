"""Plugins of 1.3 to 1.5, written as their users wrote them, drive the mesh."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trained, trainer, weights
from torch_compat.accelerators import Accelerator, CPUAccelerator
from torch_compat.legacy.precision_plugin import NativeMixedPrecisionPlugin, PrecisionPlugin
from torch_compat.legacy.training_type import DDPPlugin, DDPShardedPlugin, SingleDevicePlugin, TrainingTypePlugin
from torch_compat.plugins import TorchCheckpointIO
from torch_compat.plugins.environments import LightningEnvironment
from torch_compat.strategies import DDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """The weights after one epoch without any plugin."""
    return weights(trained())


class FromScratch(TrainingTypePlugin):
    """A plugin of 1.4 with every abstract member of its own, for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    on_gpu = property(lambda self: False)
    on_tpu = property(lambda self: False)
    is_global_zero = property(lambda self: True)
    root_device = property(lambda self: torch.device("cpu"))

    def model_to_device(self) -> None:
        self.called.append("model_to_device")
        self.model.to(self.root_device)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self.called.append("reduce")
        return tensor

    def barrier(self, name: str | None = None) -> None:
        self.called.append("barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return tensor

    def teardown(self) -> None:
        self.called.append(f"teardown after {self.results}")

    def setup(self, model: Any) -> None:
        self.called.append(f"setup {type(model).__name__}")

    def start_training(self, trainer: Any) -> None:
        self.called.append("start_training")
        super().start_training(trainer)

    def pre_dispatch(self) -> None:
        self.called.append("pre_dispatch")

    def dispatch(self, trainer: Any) -> None:
        self.called.append("dispatch")

    def post_dispatch(self) -> None:
        self.called.append("post_dispatch")

    def post_optimizer_step(self, optimizer: Any, optimizer_idx: int, **kwargs: Any) -> None:
        self.called.append(f"post_optimizer_step {type(optimizer).__name__} {optimizer_idx}")

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.called.append(f"on_train_batch_start {len(batch)} {batch_idx} {dataloader_idx}")

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        return current_global_step + 2


def test_a_plugin_from_scratch_is_what_the_loop_calls() -> None:
    plugin, net = FromScratch(), Net()
    one = trainer(plugins=[plugin], devices="auto", max_epochs=1)
    one.fit(net, loader(batch_size=16))
    assert one.world_size == 1  # it drives its own root device, unless `devices` says more
    assert [call for call in plugin.called if call not in ("barrier", "reduce")] == [
        "setup Net", "model_to_device", "pre_dispatch", "start_training", "dispatch",
        "on_train_batch_start 2 0 0", "post_optimizer_step SGD 0", "on_train_batch_start 2 1 0", "post_optimizer_step SGD 0",
        "post_dispatch", "teardown after None",
    ]  # fmt: skip
    assert "barrier" in plugin.called
    assert one.global_step == 4
    torch.testing.assert_close(weights(net), weights(trained(devices=8)))


class Sharded(DDPShardedPlugin):
    """A sharding plugin of 1.4: shards the model as it is made, delays the optimizers, has its own checkpoint."""

    in_context = False

    @property
    def setup_optimizers_in_pre_dispatch(self) -> bool:
        return True

    @contextlib.contextmanager
    def model_sharded_context(self) -> Any:
        self.in_context = True
        with super().model_sharded_context():
            yield
        self.in_context = False

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str) -> None:
        super().save_checkpoint({**checkpoint, "by": "the plugin"}, filepath)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        self.loss = float(closure_loss)


class MadeInContext(Net):
    def configure_sharded_model(self) -> None:
        plugin = self.trainer.training_type_plugin  # 1.4's spelling
        assert plugin is self.trainer.strategy.plugin
        self.made = (plugin.in_context, plugin.call_configure_sharded_model_hook)


def test_a_sharding_plugin_of_1_4(expected: torch.Tensor, tmp_path: Any) -> None:
    plugin, net = Sharded(), MadeInContext()
    one = trainer(plugins=plugin)
    one.fit(net, loader())
    assert net.made == (True, True) and not plugin.call_configure_sharded_model_hook
    assert dict(one.strategy.mesh.shape) == {"data": 1, "fsdp": 8} and plugin.loss > 0
    torch.testing.assert_close(weights(net), expected)
    one.save_checkpoint(tmp_path / "a.ckpt")
    assert plugin.load_checkpoint_file(str(tmp_path / "a.ckpt"))["by"] == "the plugin"


class Hub(CPUAccelerator):
    """An accelerator of 1.3: logs what it is asked for, and changes steps and gradients."""

    def __init__(self, *plugins: Any) -> None:
        super().__init__(*plugins)
        self.called: list[str] = []

    def setup(self, trainer: Any, model: Any = None) -> None:
        self.called.append(f"setup {type(model).__name__}")
        super().setup(trainer, model)

    def training_step(self, step_kwargs: dict[str, Any]) -> Any:
        assert list(step_kwargs) == ["batch", "batch_idx"]
        return super().training_step(step_kwargs)

    def training_step_end(self, output: Any) -> Any:
        return 2 * output

    def backward(self, closure_loss: Any, optimizer: Any, optimizer_idx: int, should_accumulate: bool, *a: Any, **k: Any) -> Any:
        return super().backward(closure_loss / 2, optimizer, optimizer_idx, should_accumulate, *a, **k)

    def optimizer_step(self, optimizer: Any, opt_idx: int, lambda_closure: Any, **kwargs: Any) -> None:
        self.called.append(f"optimizer_step {opt_idx}")
        super().optimizer_step(optimizer, opt_idx, lambda_closure, **kwargs)

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Any, opt_idx: int) -> None:
        self.called.append(f"optimizer_zero_grad {current_epoch} {batch_idx} {opt_idx}")
        super().optimizer_zero_grad(current_epoch, batch_idx, optimizer, opt_idx)

    def clip_gradients(self, optimizer: Any, clip_val: Any, gradient_clip_algorithm: Any = "norm") -> None:
        self.called.append(f"clip_gradients {clip_val}")

    def on_train_epoch_end(self) -> None:
        self.called.append("on_train_epoch_end")


class SkipsFirst(PrecisionPlugin):
    """``pre_optimizer_step`` returning False skips the update."""

    seen = 0

    def pre_optimizer_step(self, *args: Any, **kwargs: Any) -> bool:
        self.seen += 1
        args[3]()  # the closure
        return self.seen > 1


def test_an_accelerator_of_1_3_with_its_plugins(expected: torch.Tensor) -> None:
    hub, net = Hub(PrecisionPlugin(), DDPPlugin()), Net()
    one = trainer(accelerator=hub, gradient_clip_val=0.01)
    one.fit(net, loader())
    assert hub.called == [
        "setup Net", "optimizer_step 0", "optimizer_zero_grad 0 0 0", "clip_gradients 0.01", "optimizer_step 0",
        "optimizer_zero_grad 0 1 0", "clip_gradients 0.01", "on_train_epoch_end",
    ]  # fmt: skip
    torch.testing.assert_close(weights(net), expected)  # twice the loss, half of it differentiated, nothing clipped
    assert hub.lightning_module is net and hub.model is net and hub.results is None
    assert hub.precision == "32-true" and hub.optimizers == one.optimizers and one.accelerator is hub


def test_a_precision_plugin_of_1_4_can_skip_the_update() -> None:
    net, plain = Net(), Net()
    trainer(accelerator=Accelerator(SkipsFirst(), DDPPlugin())).fit(net, loader())
    x, y = (part[16:] for part in loader().dataset.tensors)
    gradients = torch.autograd.grad(torch.nn.functional.mse_loss(plain.net(x), y), list(plain.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    torch.testing.assert_close(weights(net), weights(plain))


def test_validation_and_prediction_go_through_the_plugin() -> None:
    class Shifted(DDPPlugin):
        def predict_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().predict_step(*args, **kwargs) + 1

        def validation_step(self, batch: Any, *args: Any) -> Any:
            return super().validation_step((batch[0], batch[1] * 0), *args)

    net = Net()
    one, plain = trainer(strategy=Shifted()), trainer()
    shifted, expected = one.predict(net, loader()), plain.predict(net, loader())
    torch.testing.assert_close(shifted[0], expected[0] + 1)
    assert one.validate(net, loader(), verbose=False) != plain.validate(net, loader(), verbose=False)
    assert len(one.strategy.plugin.results) == 1


def test_mixed_precision_of_1_5() -> None:
    one = trainer(plugins=[DDPPlugin(), NativeMixedPrecisionPlugin("bf16")])
    assert one.precision == "bf16-mixed"
    one.fit(net := Net(), loader())
    assert not torch.equal(weights(net), weights(Net()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": "ddp", "plugins": [DDPPlugin()]}, "strategy=ddp and plugins=DDPPlugin are two strategies at once"),
        (
            {"plugins": [DDPPlugin(), SingleDevicePlugin()]},
            "multiple values for TrainingTypePlugin flags in `plugins`: DDPPlugin and SingleDevicePlugin",
        ),
        ({"accelerator": Accelerator(PrecisionPlugin(), DDPPlugin()), "strategy": DDPStrategy()}, "two strategies at once"),
    ],
)
def test_two_at_once_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        trainer(**arguments)


def test_eras_that_do_not_mix_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a TrainingTypePlugin; give a Strategy"):
        trainer(accelerator=Accelerator(PrecisionPlugin(), DDPStrategy()))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Accelerator of Lightning 2.x.*lacks parse_devices"):
        trainer(accelerator=Accelerator())
    with pytest.raises(TypeError, match=r"abstract.*teardown"):
        type("Half", (TrainingTypePlugin,), {"barrier": lambda self: None})()


def test_a_plugins_own_checkpoint_io_and_environment_are_used(tmp_path: Any) -> None:
    class Environment(LightningEnvironment):
        def validate_settings(self, num_devices: int, num_nodes: int) -> None:
            self.validated = num_devices

    environment = Environment()
    one = trainer(plugins=[DDPPlugin(checkpoint_io=TorchCheckpointIO(), cluster_environment=environment)])
    one.fit(Net(), loader())
    one.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").is_file() and environment.validated == 8


def test_a_plugin_that_no_trainer_took_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"DDPPlugin is used before a Trainer took it"):
        DDPPlugin().save_checkpoint({}, "nowhere")


class Ascends(PrecisionPlugin):
    """Turns the loss around in batches that only add their gradients."""

    def backward(self, model: Any, closure_loss: Any, optimizer: Any, opt_idx: int = 0, should_accumulate: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().backward(model, -closure_loss if should_accumulate else closure_loss, optimizer, opt_idx)


class AscendingHub(CPUAccelerator):
    """The same in the accelerator."""

    def backward(self, closure_loss: Any, optimizer: Any, optimizer_idx: int, should_accumulate: bool, *a: Any, **k: Any) -> Any:
        loss = -closure_loss if should_accumulate else closure_loss
        return super().backward(loss, optimizer, optimizer_idx, should_accumulate, *a, **k)


@pytest.mark.parametrize("hub", [CPUAccelerator(Ascends(), DDPPlugin()), AscendingHub(PrecisionPlugin(), DDPPlugin())])
def test_backward_knows_whether_its_batch_accumulates(hub: Any) -> None:
    net, plain = Net(), Net()
    trainer(accelerator=hub, max_epochs=1, accumulate_grad_batches=2).fit(net, loader(rows=48))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    xs, ys = loader(rows=48).dataset.tensors
    for index, (x, y) in enumerate(zip(xs.split(16), ys.split(16), strict=True)):
        loss = torch.nn.functional.mse_loss(plain.net(x), y) / 2
        (-loss if index == 0 else loss).backward()
        if index:  # the last batch of an epoch steps too
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(net), weights(plain))


class OwnOptimizers(CPUAccelerator):
    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers = [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.02)]
        self.lr_schedulers = [
            {"scheduler": torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, gamma=0.5), "interval": "step"},
        ]


class InitsOptimizers(DDPPlugin):
    def init_optimizers(self, trainer: Any, model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), "interval": "step"}], []


class Delayed(InitsOptimizers):
    setup_optimizers_in_pre_dispatch = True


class OfTwo(DDPStrategy):
    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers = [torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.02)]


@pytest.mark.parametrize(
    ("make", "schedulers"),
    [
        (lambda: {"accelerator": OwnOptimizers(PrecisionPlugin(), DDPPlugin())}, 1),
        (lambda: {"strategy": InitsOptimizers()}, 1),
        (lambda: {"plugins": [Delayed()]}, 1),
        (lambda: {"strategy": OfTwo()}, 0),
    ],
)
def test_optimizers_that_a_plugin_makes_are_those_that_step(make: Any, schedulers: int) -> None:
    net, plain = Net(), Net()
    one = trainer(max_epochs=1, **make())
    one.fit(net, loader(rows=48))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.02)
    xs, ys = loader(rows=48).dataset.tensors
    for index, (x, y) in enumerate(zip(xs.split(16), ys.split(16), strict=True)):
        optimizer.param_groups[0]["lr"] = 0.02 * (0.5**index if schedulers else 1)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(plain.net(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(net), weights(plain))
    assert len(one.lr_scheduler_configs) == schedulers


def test_frequencies_that_a_plugin_gives_are_refused() -> None:
    class Turns(DDPPlugin):
        def init_optimizers(self, trainer: Any, model: Any) -> Any:
            made = super().init_optimizers(trainer, model)
            return made[0], made[1], [1, 5]

    with pytest.raises(MisconfigurationException, match="the 'frequency' of an optimizer is not offered"):
        trainer(strategy=Turns()).fit(Net(), loader())


def test_a_loss_that_pre_backward_replaces_is_refused() -> None:
    class Doubles(PrecisionPlugin):
        def pre_backward(self, model: Any, closure_loss: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * closure_loss

    with pytest.raises(MisconfigurationException, match=r"Doubles.pre_backward returned another loss.*override `backward`"):
        trainer(accelerator=CPUAccelerator(Doubles(), DDPPlugin())).fit(Net(), loader())


def test_the_trainers_accelerator_has_the_plugins() -> None:
    plugin = DDPPlugin()
    one = trainer(strategy=plugin)
    one.fit(Net(), loader())
    assert isinstance(one.accelerator, CPUAccelerator) and one.accelerator.training_type_plugin is plugin
    assert one.accelerator.all_gather(torch.ones(2)).shape == (1, 2)
