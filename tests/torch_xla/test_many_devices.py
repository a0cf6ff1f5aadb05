"""Four devices by SPMD: the same losses and weights as plain torch on the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla
from jax.sharding import PartitionSpec

import torch_compat as pl
from tests.torch_xla.training import ROWS, WIDTH, Net, difference, loader, make, plain_training, trainer
from torch_compat.strategies import SingleDeviceXLAStrategy, XLAFSDPStrategy, XLAStrategy
from torch_compat.utilities.exceptions import MisconfigurationException

WHOLE = "{replicated}"
SPLIT = "{devices=[4,1]0,1,2,3}"


def layout(tensor: torch.Tensor) -> str:
    return torch_xla._XLAC._get_xla_sharding_spec(tensor)


class Layouts(pl.Callback):
    """How the run's tensors lie after each batch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.params = {name: layout(param) for name, param in module.named_parameters()}
        self.state = {
            name: {key: layout(leaf) for key, leaf in trainer.optimizers[0].state[param].items() if leaf.ndim}
            for name, param in module.named_parameters()
        }
        self.devices = {str(param.device) for param in module.parameters()} | {str(module.device)}


def test_data_parallel_training_is_plain_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clipping, weight decay, a schedule, BatchNorm over the global batch, and a last batch that does not divide."""
    monkeypatch.setenv("XLATRAIN_REPORT", str(tmp_path / "report.json"))
    reference = make()
    expected = plain_training(reference, clip=0.5)
    module, layouts = make(), Layouts()
    first = next(module.parameters())
    run = trainer("torch_xla", 4, gradient_clip_val=0.5, callbacks=[layouts])
    run.fit(module, loader(4), loader(4))

    assert run.world_size == run.strategy.data_parallel_size == 4  # pyright: ignore[reportAttributeAccessIssue]
    assert module.values() == pytest.approx(expected, abs=1e-6)
    assert difference(module, reference) < 1e-5
    assert set(layouts.params.values()) == {WHOLE}
    assert layouts.devices == {"xla:0"}
    assert next(module.parameters()) is first
    assert first.device.type == "cpu"
    assert run.callback_metrics["loss_step"] == pytest.approx(expected[-1], abs=1e-6)
    sizes = [8, 8, 6]
    mean = sum(size * loss for size, loss in zip(sizes, expected[-3:], strict=True)) / ROWS
    assert run.callback_metrics["loss_epoch"] == pytest.approx(mean, abs=1e-6)
    reference.eval()
    with torch.no_grad():
        whole = [(reference(x), y) for x, y in loader(1)]
    expected_val = sum(len(y) * float(torch.nn.functional.cross_entropy(x, y)) for x, y in whole) / ROWS
    assert run.callback_metrics["val_loss"] == pytest.approx(expected_val, abs=1e-5)

    right = sum(int((x.argmax(1) == y).sum()) for x, y in whole)
    assert run.callback_metrics["val_accuracy"] == pytest.approx(right / ROWS)
    assert module.accuracy.device.type == "cpu"

    predicted = torch.cat(run.predict(module, loader(4)))  # pyright: ignore[reportArgumentType]
    assert torch.allclose(predicted, torch.cat([x for x, _ in whole]), atol=1e-5)
    fit, predict = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert (fit["executor"], fit["backend"], fit["platform"], fit["mesh"], fit["steps"]) == (
        "eager",
        "torch_xla",
        "cpu",
        {"data": 4},
        6,
    )
    assert fit["variants"] <= 8, "the number of programs must not grow with the steps"
    assert predict["stage"] == "predict"


def test_fsdp_splits_parameters_and_state() -> None:
    reference = make()
    expected = plain_training(reference, clip=0.5)
    module, layouts = make(), Layouts()
    hooks = [len(block._backward_hooks) + len(block._forward_hooks) for block in module.blocks]
    trainer(XLAFSDPStrategy(), 4, gradient_clip_val=0.5, callbacks=[layouts]).fit(module, loader(4))
    assert module.values() == pytest.approx(expected, abs=1e-6)
    assert difference(module, reference) < 1e-5
    assert layouts.params["blocks.0.weight"] == SPLIT
    assert layouts.state["blocks.0.weight"] == {"exp_avg": SPLIT, "exp_avg_sq": SPLIT}
    assert layouts.params["head.bias"] == WHOLE  # three elements
    assert [len(block._backward_hooks) + len(block._forward_hooks) for block in module.blocks] == hooks
    assert list(module.state_dict()) == list(reference.state_dict())


def test_rules_and_axes_are_those_of_every_strategy() -> None:
    """Two axes: rows over one, the weights' outputs over the other; accumulation too."""
    reference = make(optimizer="sgd")
    expected = plain_training(reference, accumulate=2)
    module, layouts = make(optimizer="sgd"), Layouts()
    strategy = XLAStrategy(axes={"data": 2, "tensor": -1}, rules=[("blocks.*.weight", PartitionSpec("tensor"))])
    run = trainer(strategy, 4, callbacks=[layouts], accumulate_grad_batches=2)
    run.fit(module, loader(2))
    assert run.strategy.data_parallel_size == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert module.values() == pytest.approx(expected, abs=1e-6)
    assert difference(module, reference) < 1e-5
    assert layouts.params["blocks.0.weight"] == "{devices=[2,1,2]0,2,1,3 last_tile_dim_replicate}"
    assert layouts.state["blocks.0.weight"] == {"momentum_buffer": layouts.params["blocks.0.weight"]}


def test_rows_of_a_host_become_shards_of_the_batch() -> None:
    """Each of several hosts makes shards of its rows; here one host has all."""
    backend: Any = trainer("torch_xla", 4).strategy.backend  # pyright: ignore[reportAttributeAccessIssue]
    rows = torch.arange(16.0).reshape(8, 2)
    batch = backend._from_own_rows(rows, ("data",))
    assert layout(batch) == SPLIT
    torch.testing.assert_close(batch.cpu(), rows)
    with pytest.raises(ValueError, match=r"processes brought \[7\] rows .* a multiple of the devices"):
        backend._from_own_rows(rows[:7], ("data",))


class Watched(Net):
    """Looks at dtypes and collectives inside of a step and outside, and logs a host number and one of a hook."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.hidden = self.blocks[0](batch[0]).dtype
        self.weight = self.blocks[0].weight.dtype
        gathered = self.all_gather(loss.detach())
        self.shape_in_step = tuple(gathered.shape)
        self.reduced = self.trainer.strategy.reduce(loss.detach(), reduce_op="sum") is not None
        self.log("index", float(batch_idx))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm())

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        strategy.barrier("here")
        value = torch.tensor([1.0, 2.0], device=self.device)
        self.outside = [
            strategy.all_gather(value).cpu().tolist(),
            strategy.reduce(value, reduce_op="mean").cpu().tolist(),
            strategy.broadcast({"a": value})["a"].cpu().tolist(),
            strategy.reduce_boolean_decision(True),
        ]


@pytest.mark.parametrize(("precision", "dtypes"), [("bf16-mixed", "mixed"), ("bf16-true", "true")])
def test_bfloat16_and_collectives(precision: Any, dtypes: str) -> None:
    expected = plain_training(make(optimizer="sgd"), epochs=1)
    module = make(Watched, optimizer="sgd")
    run = trainer("torch_xla", 4, max_epochs=1, precision=precision)
    run.fit(module, loader(4))
    assert module.hidden == torch.bfloat16
    assert module.weight == (torch.float32 if dtypes == "mixed" else torch.bfloat16)
    assert next(module.parameters()).dtype == module.weight
    assert module.values() == pytest.approx(expected, abs=0.03)
    assert module.values() != pytest.approx(expected, abs=1e-6)
    assert module.shape_in_step == (1,)
    assert module.outside == [[[1.0, 2.0]], [1.0, 2.0], [1.0, 2.0], True]
    assert run.callback_metrics["index"] == 2.0
    assert 0 < float(run.callback_metrics["norm"]) < 100


class Manual(Net):
    """The update by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        optimizer = self.optimizers()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()  # pyright: ignore[reportAttributeAccessIssue]
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")  # pyright: ignore[reportArgumentType]
        optimizer.step()  # pyright: ignore[reportAttributeAccessIssue]
        self.losses.append(loss.detach())


def test_manual_optimization() -> None:
    reference = make(optimizer="sgd")
    expected = plain_training(reference, clip=0.5)
    module = make(Manual, optimizer="sgd")
    run = trainer("torch_xla", 4)
    run.fit(module, loader(4))
    assert run.global_step == 6
    assert module.values() == pytest.approx(expected, abs=1e-6)
    assert difference(module, reference) < 1e-5


def test_refusals() -> None:
    with pytest.raises(MisconfigurationException, match="SPMD over 4 devices was switched on"):
        trainer(SingleDeviceXLAStrategy(), 1)
    with pytest.raises(MisconfigurationException, match="single_xla' with 4 devices"):
        trainer("single_xla", 4)
    with pytest.raises(ValueError, match="expected an axis 'fsdp'"):
        XLAFSDPStrategy(axes={"data": 4})
    with pytest.raises(ValueError, match="unknown axes \\['rows'\\]"):
        XLAStrategy(axes={"rows": 4})
    with pytest.raises(ValueError, match="matches no module of Net"):
        trainer(XLAFSDPStrategy(auto_wrap_policy={torch.nn.LSTM}), 4).fit(make(), loader(4))
    with pytest.raises(MisconfigurationException, match="activation_checkpointing_policy"):
        XLAFSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})
    with pytest.raises(MisconfigurationException, match="sync_module_states"):
        XLAStrategy(sync_module_states=False)
    assert WIDTH % 4 == 0
