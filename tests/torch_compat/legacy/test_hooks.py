"""Modules of 1.3 to 1.6: hooks that 2.x removed fire in modules of ``pytorch_lightning``, and raise in those of ``lightning``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trainer, weights
from torch_compat.legacy.callback import Callback
from torch_compat.legacy.module import LightningModule
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")


class Old(LightningModule):
    """A module as users of 1.5 wrote them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(4, 1)
        self.calls: list[Any] = []
        self.outputs: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]), "rows": batch_idx + 1}

    def training_step_end(self, output: Any) -> Any:
        output["loss"] = output["loss"] * 2
        return output

    def training_epoch_end(self, outputs: Any) -> None:
        self.calls.append("training_epoch_end")
        self.outputs["train"] = outputs
        self.log("mean", torch.stack([output["loss"] for output in outputs]).mean())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]) + dataloader_idx

    def validation_step_end(self, output: Any) -> Any:
        return output + 1

    def validation_epoch_end(self, outputs: Any) -> None:
        self.calls.append("validation_epoch_end")
        self.outputs["val"] = outputs

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return [loader(), loader(rows=16)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.calls.append(f"on_train_batch_start {dataloader_idx}")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.calls.append(f"on_train_batch_end {dataloader_idx}")

    def on_train_epoch_end(self, outputs: Any) -> None:
        self.calls.append(f"on_train_epoch_end {len(outputs)}")

    def on_before_optimizer_step(self, optimizer: Any, optimizer_idx: int) -> None:
        self.calls.append(f"on_before_optimizer_step {optimizer_idx}")

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, optimizer_closure: Any, on_tpu: bool,
        using_native_amp: bool, using_lbfgs: bool,
    ) -> None:  # fmt: skip
        self.calls.append(f"optimizer_step {optimizer_idx} {on_tpu}")
        super().optimizer_step(
            epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_native_amp, using_lbfgs
        )


def _noting(name: str) -> Any:
    def hook(self: Old) -> None:
        self.calls.append(name)

    return hook


_PLAIN = (
    "on_fit_start", "on_pretrain_routine_start", "on_pretrain_routine_end", "on_train_start", "on_epoch_start", "on_epoch_end",
    "on_train_dataloader", "on_val_dataloader", "on_post_move_to_device", "configure_sharded_model", "on_validation_epoch_end",
    "on_train_epoch_start", "on_train_end", "on_fit_end",
)  # fmt: skip
for _name in _PLAIN:
    setattr(Old, _name, _noting(_name))


class OldCallback(Callback):
    """A callback as users of 1.4 wrote them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_init_end(self, trainer: Any) -> None:
        self.calls.append(f"on_init_end {len(trainer.callbacks)}")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, callback_state: Any) -> None:
        self.calls.append(f"on_load_checkpoint {callback_state}")

    def on_batch_start(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_batch_start")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        self.calls.append(f"on_train_batch_end {dataloader_idx}")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any, unused: Any = None) -> None:
        self.calls.append(f"on_train_epoch_end {unused}")

    def on_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("on_epoch_end")


def test_removed_hooks_fire_where_their_pages_say() -> None:
    module, callback = Old(), OldCallback()
    one = trainer(callbacks=[callback])
    one.fit(module)
    batch = ["on_train_batch_start 0", "optimizer_step 0 False", "on_before_optimizer_step 0", "on_train_batch_end 0"]
    assert module.calls == [
        "configure_sharded_model", "on_post_move_to_device", "on_fit_start", "on_pretrain_routine_start",
        "on_pretrain_routine_end", "on_train_dataloader", "on_val_dataloader", "on_train_start", "on_epoch_start",
        "on_train_epoch_start", *batch, *batch, "on_epoch_start", "validation_epoch_end", "on_validation_epoch_end",
        "on_epoch_end", "training_epoch_end", "on_train_epoch_end 2", "on_epoch_end", "on_train_end", "on_fit_end",
    ]  # fmt: skip
    train, (first, second) = module.outputs["train"], module.outputs["val"]
    assert [output["rows"] for output in train] == [1, 2] and (len(first), len(second)) == (2, 1)
    assert one.callback_metrics["mean"] == pytest.approx(sum(float(output["loss"]) for output in train) / 2)
    x, y = loader(rows=16).dataset.tensors
    with torch.no_grad():
        last = torch.nn.functional.mse_loss(module.net(x), y)
    assert float(second[0]) == pytest.approx(float(last) + 2, rel=1e-5)  # the loader's index, and the step's end
    assert callback.calls == [
        "on_init_end 1", "on_batch_start", "on_train_batch_end 0", "on_batch_start", "on_train_batch_end 0", "on_epoch_end",
        "on_train_epoch_end None", "on_epoch_end",
    ]  # fmt: skip


def test_a_callbacks_state_is_what_on_save_checkpoint_returns(tmp_path: Any) -> None:
    one = trainer(callbacks=[OldCallback()])
    one.fit(Old())
    one.save_checkpoint(tmp_path / "a.ckpt")
    again = OldCallback()
    trainer(callbacks=[again], max_epochs=2).fit(Old(), ckpt_path=tmp_path / "a.ckpt")
    assert again.calls[:2] == ["on_init_end 1", "on_load_checkpoint {'calls': 8}"]


def test_frequencies_of_optimizers_are_refused() -> None:
    class Taking(Gan):
        def configure_optimizers(self) -> Any:
            return [{"optimizer": optimizer, "frequency": 1} for optimizer in super().configure_optimizers()[0]]

    with pytest.raises(MisconfigurationException, match="'frequency' of an optimizer is not offered"):
        trainer().fit(Taking(), loader())


def test_the_loss_of_training_step_end_is_minimised() -> None:
    module, plain = Old(), Net(lr=0.2)  # twice the loss is twice the rate
    trainer().fit(module)
    trainer().fit(plain, loader())
    torch.testing.assert_close(weights(module), weights(plain))


class Tied(LightningModule):
    """Weights tied where 1.x documents it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)

    def on_post_move_to_device(self) -> None:
        self.decoder.weight = self.encoder.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.1)


def test_weights_tied_in_on_post_move_to_device_are_one_parameter() -> None:
    module, plain = Tied(), Tied()
    trainer().fit(module, loader())
    assert module.decoder.weight is module.encoder.weight
    weight = plain.encoder.weight
    for rows in (slice(0, 16), slice(16, 32)):
        x = loader().dataset.tensors[0][rows]
        loss = torch.nn.functional.mse_loss(x @ weight.T @ weight.T, x)
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= 0.1 * gradient
    torch.testing.assert_close(module.encoder.weight, weight)


def test_several_optimizers_give_a_list_of_outputs_each() -> None:
    module = Gan()
    trainer(max_epochs=1).fit(module, loader(rows=48))
    assert [len(outputs) for outputs in module.given] == [3, 3]  # a list for each optimizer


def test_what_1_5_gave_by_keyword_may_come_in_any_order() -> None:
    class Reordered(Net):
        def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_idx: int, on_tpu: bool = False,
            using_native_amp: bool = False, using_lbfgs: bool = False, optimizer_closure: Any = None,
        ) -> None:  # fmt: skip
            assert on_tpu is False and using_lbfgs is False
            optimizer.step(closure=optimizer_closure)

    class OldNet(Reordered, LightningModule):
        pass

    module, plain = OldNet(), Net()
    trainer(max_epochs=1).fit(module, loader())
    trainer(max_epochs=1).fit(plain, loader())
    torch.testing.assert_close(weights(module), weights(plain))


def test_epoch_ends_return_nothing() -> None:
    class Returns(Old):
        def validation_epoch_end(self, outputs: Any) -> Any:
            return {"log": {"val_loss": 1.0}}

    with pytest.warns(UserWarning, match=r"`Returns.validation_epoch_end` should not return anything.*self.log"):
        trainer(max_epochs=1).fit(Returns())

    class Trained(Old):
        def training_epoch_end(self, outputs: Any) -> Any:
            return {"log": {"train_loss": 1.0}}

    with pytest.raises(MisconfigurationException, match=r"`Trained.training_epoch_end` expects a return of None"):
        trainer(max_epochs=1).fit(Trained())


class Gan(LightningModule):
    """Two optimizers under automatic optimization, as 1.x has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.g, self.d = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.given: Any = None

    def losses(self, x: torch.Tensor) -> tuple[Any, Any]:
        bce, ones, zeros = torch.nn.functional.binary_cross_entropy_with_logits, torch.ones(len(x), 1), torch.zeros(len(x), 1)
        return (
            lambda: bce(self.d(self.g(x)), ones),
            lambda: bce(self.d(x), ones) + bce(self.d(self.g(x).detach()), zeros),
        )

    def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
        loss = self.losses(batch[0])[optimizer_idx]()
        self.log(("g", "d")[optimizer_idx], loss)
        return loss

    def training_epoch_end(self, outputs: Any) -> None:
        self.given = outputs

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.g.parameters(), lr=0.01), torch.optim.SGD(self.d.parameters(), lr=0.1)], []


def test_several_optimizers_are_one_program_and_equal_torch_by_hand() -> None:
    module, plain = Gan(), Gan()
    one = trainer(max_epochs=2)
    one.fit(module, loader())
    optimizers = plain.configure_optimizers()[0]
    for _ in range(2):
        for rows in (slice(0, 16), slice(16, 32)):
            for index, optimizer in enumerate(optimizers):
                optimizer.zero_grad()
                loss = plain.losses(loader().dataset.tensors[0][rows])[index]()
                loss.backward()
                optimizer.step()
    torch.testing.assert_close(weights(module), weights(plain), rtol=1e-4, atol=1e-5)
    assert one.callback_metrics["d"] == pytest.approx(loss.item(), rel=1e-4)
    assert one.global_step == 8 and [len(outputs) for outputs in module.given] == [2, 2]
    torch.testing.assert_close(module.given[1][1]["loss"], loss.detach(), rtol=1e-4, atol=1e-5)
    assert one.executor.steps.log.steps == 4  # one program for each batch


class TestThroughLightning:
    """Hooks that stock 2.6 removed raise, or are no hooks."""

    @pytest.mark.parametrize("name", ["training_epoch_end", "validation_epoch_end"])
    def test_epoch_ends_raise(self, name: str) -> None:
        module = type("Removed", (Net,), {name: lambda self, outputs: None})()
        with pytest.raises(NotImplementedError, match=rf"Support for `{name}` has been removed in v2.0.0. `Removed` implements"):
            trainer().fit(module, loader(), loader())

    def test_several_optimizers_raise(self) -> None:
        class Several(Net):
            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

        with pytest.raises(RuntimeError, match="only supported with manual optimization"):
            trainer().fit(Several(), loader())

    def test_old_signatures_raise(self) -> None:
        module = type("Signature", (Net,), {"on_train_batch_start": lambda self, batch, batch_idx, dataloader_idx: None})()
        with pytest.raises(TypeError, match="dataloader_idx"):
            trainer().fit(module, loader())

    def test_others_are_no_hooks(self) -> None:
        called: list[str] = []
        names = ("on_pretrain_routine_start", "on_epoch_end", "on_post_move_to_device", "training_step_end")
        module = type("Others", (Net,), {name: lambda self, *args: called.append("called") for name in names})()
        trainer().fit(module, loader())
        assert called == []
