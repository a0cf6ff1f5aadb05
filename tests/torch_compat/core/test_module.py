"""LightningModule outside of a run."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from torch_compat.core.hooks import DataHooks
from torch_compat.core.module import LightningModule
from torch_compat.core.optimizer import LightningOptimizer
from torch_compat.core.toggling import restore_requires_grad, take_requires_grad
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.trainer.trainer import Trainer
from torch_compat.utilities.exceptions import MisconfigurationException


@pytest.fixture
def module() -> BoringModel:
    return BoringModel()


def trainer(**kwargs: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, **kwargs
    )


def test_every_mixin_is_constructed() -> None:
    class Extra:
        def __init__(self) -> None:
            super().__init__()
            self.extra = True

    class Module(Extra, LightningModule):
        pass

    module = Module()
    assert module.extra
    assert module.prepare_data_per_node
    assert not module._log_hyperparams
    assert module.training


def test_values_without_a_trainer(module: BoringModel) -> None:
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert module.logger is None
    assert module.loggers == []
    assert module.fabric is None
    assert module.device == torch.device("cpu")
    assert module.dtype == torch.float32
    assert module.device_mesh is None
    assert module.automatic_optimization
    assert module.strict_loading
    assert not module.on_gpu


def test_what_needs_a_trainer_says_so(module: BoringModel) -> None:
    for use in (
        lambda: module.trainer,
        module.optimizers,
        module.lr_schedulers,
        lambda: module.print("x"),
        lambda: module.all_gather(torch.ones(1)),
    ):
        with pytest.raises(RuntimeError, match="BoringModel is not attached to a `Trainer`"):
            use()


def test_the_trainer_reaches_nested_modules_and_stays_behind_in_copies(module: BoringModel) -> None:
    module.inner = BoringModel()
    attached = trainer()
    module.trainer = attached
    assert module.inner.trainer is attached
    assert copy.deepcopy(module)._trainer is None
    assert pickle.loads(pickle.dumps(module))._trainer is None
    module.trainer = None
    assert module.inner._trainer is None


def test_steps_of_the_base_class() -> None:
    module = LightningModule()
    with pytest.warns(UserWarning, match="`training_step` must be implemented"):
        assert module.training_step(None, 0) is None
    with pytest.warns(UserWarning, match="`configure_optimizers` must be implemented"):
        assert module.configure_optimizers() is None
    assert module.validation_step(None, 0) is None
    assert module.test_step(None, 0) is None
    assert module.configure_callbacks() == []
    with pytest.raises(NotImplementedError, match="forward"):
        module(1)
    for stage in ("train", "val", "test", "predict"):
        with pytest.raises(MisconfigurationException, match=f"`{stage}_dataloader` must be implemented"):
            getattr(module, f"{stage}_dataloader")()


def test_predict_step_is_forward(module: BoringModel) -> None:
    batch = torch.ones(2, 32)
    torch.testing.assert_close(module.predict_step(batch, 0), module(batch))
    torch.testing.assert_close(module.predict_step(batch=batch, batch_idx=0), module(batch))


class TestDeviceAndDtype:
    def test_they_follow_moves_and_reach_nested_modules(self, module: BoringModel) -> None:
        module.wrapper = nn.Sequential(BoringModel())
        inner = module.wrapper[0]
        for move, dtype in (
            (module.double, torch.float64),
            (module.half, torch.float16),
            (module.bfloat16, torch.bfloat16),
            (module.float, torch.float32),
            (lambda: module.to(torch.float64), torch.float64),
            (lambda: module.type(torch.float32), torch.float32),
        ):
            assert move() is module
            assert module.dtype == inner.dtype == inner.layer.weight.dtype == dtype
        module.to("meta")
        assert module.device == inner.device == inner.layer.weight.device == torch.device("meta")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="about machines where torch has no CUDA")
    def test_a_move_to_cuda_that_torch_lacks_changes_only_the_dtype(self, module: BoringModel) -> None:
        assert module.cuda() is module
        module.to("cuda:0", torch.float64)
        assert module.device == torch.device("cpu")
        assert module.layer.weight.dtype == torch.float64

    def test_they_cannot_be_set(self, module: BoringModel) -> None:
        with pytest.raises(RuntimeError, match=r"Please use module.to\(new_dtype\)"):
            module.dtype = torch.float16


def test_freeze(module: BoringModel) -> None:
    assert module.freeze() is module
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert module.unfreeze() is module
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())


class TestToggle:
    def test_only_the_active_optimizers_parameters_require_gradients(self) -> None:
        mine, shared, other = (nn.Parameter(torch.ones(1)) for _ in range(3))
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        active = torch.optim.SGD([mine, shared, frozen], lr=0.1)
        passive = LightningOptimizer(torch.optim.SGD([shared, other], lr=0.1))

        def required() -> list[bool]:
            return [parameter.requires_grad for parameter in (mine, shared, other, frozen)]

        state = take_requires_grad([active, passive], active)
        assert required() == [True, True, False, False]
        restore_requires_grad([active, passive], active, state)
        assert required() == [True, True, True, False]
        state = take_requires_grad([active, passive], passive)
        assert required() == [False, True, True, False]
        restore_requires_grad([active, passive], passive, state)
        assert required() == [True, True, True, False]


class TestLightningOptimizer:
    def test_it_is_the_optimizer_it_wraps(self, module: BoringModel) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        wrapped = LightningOptimizer(optimizer)
        assert isinstance(wrapped, torch.optim.SGD)
        assert isinstance(wrapped, LightningOptimizer)
        assert type(wrapped).__name__ == "LightningSGD"
        assert wrapped.optimizer is optimizer
        assert wrapped.param_groups is optimizer.param_groups
        optimizer.param_groups[0]["lr"] = 0.5
        assert wrapped.param_groups[0]["lr"] == 0.5

    def test_state_goes_to_the_wrapped_optimizer(self, module: BoringModel) -> None:
        def stepped() -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            module(torch.ones(1, 32)).sum().backward()
            optimizer.step()
            return optimizer

        source, target = stepped(), torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)
        wrapped = LightningOptimizer(target)
        wrapped.load_state_dict(source.state_dict())
        torch.testing.assert_close(target.state_dict(), source.state_dict())
        wrapped.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())

    def test_errors(self, module: BoringModel) -> None:
        wrapped = LightningOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        with pytest.raises(MisconfigurationException, match="the closure should be callable"):
            wrapped.step(closure=3)
        with pytest.raises(RuntimeError, match="belongs to no run"):
            wrapped.step()


class TestOptimizationMethods:
    def test_manual_backward_needs_manual_optimization(self, module: BoringModel) -> None:
        with pytest.raises(MisconfigurationException, match="disable automatic optimization"):
            module.manual_backward(torch.ones(1))

    def test_backward_passes_arguments_on(self, module: BoringModel) -> None:
        loss = module(torch.ones(1, 32)).sum()
        module.backward(loss, retain_graph=True)
        module.backward(loss)
        assert module.layer.bias.grad is not None
        torch.testing.assert_close(module.layer.bias.grad, torch.full((2,), 2.0))

    def test_optimizer_step_and_zero_grad(self, module: BoringModel) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        before = module.layer.bias.detach().clone()

        def closure() -> torch.Tensor:
            loss = module(torch.ones(1, 32)).sum()
            loss.backward()
            return loss

        module.optimizer_step(0, 0, optimizer, closure)
        torch.testing.assert_close(module.layer.bias.detach(), before - 1)
        module.optimizer_zero_grad(0, 0, optimizer)
        assert module.layer.bias.grad is None

    def test_lr_scheduler_step(self, module: BoringModel) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        for metric in (1.0, 2.0):
            module.lr_scheduler_step(plateau, metric)
        assert optimizer.param_groups[0]["lr"] == 0.5

    def test_clipping_arguments(self, module: BoringModel) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        module.trainer = trainer(gradient_clip_val=0.5)
        with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0.5.*Please use only one of them"):
            module.clip_gradients(optimizer, gradient_clip_val=0.1)
        with pytest.raises(MisconfigurationException, match=r"algorithm` foo is invalid.*\['value', 'norm'\]"):
            module.clip_gradients(optimizer, gradient_clip_algorithm="foo")
        module.trainer = trainer()
        with pytest.raises(TypeError, match=r"should be an int or a float\. Got x"):
            module.clip_gradients(optimizer, gradient_clip_val="x")

    def test_clipping_clips(self, module: BoringModel) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        module.trainer = trainer()
        module(torch.full((4, 32), 100.0)).sum().backward()
        module.configure_gradient_clipping(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
        torch.testing.assert_close(torch.stack(norms).norm(), torch.tensor(0.5), rtol=1e-4, atol=0)


class TestExport:
    def test_torchscript_keeps_modes(self, module: BoringModel) -> None:
        module.example_input_array = torch.ones(1, 32)
        expected = module(module.example_input_array)
        for method in ("script", "trace"):
            with pytest.warns(DeprecationWarning):
                compiled = module.to_torchscript(method=method)
            torch.testing.assert_close(compiled(module.example_input_array), expected)
            assert module.training

    def test_torchscript_errors(self, module: BoringModel) -> None:
        with pytest.raises(ValueError, match="only supports 'script' or 'trace', but value given was: x"):
            module.to_torchscript(method="x")
        with pytest.warns(DeprecationWarning), pytest.raises(ValueError, match="requires either `example_inputs` or"):
            module.to_torchscript(method="trace")

    @pytest.mark.skipif(importlib.util.find_spec("onnx") is not None, reason="about environments without onnx")
    def test_onnx_needs_the_package(self, module: BoringModel) -> None:
        with pytest.raises(ModuleNotFoundError, match="requires `onnx` to be installed"):
            module.to_onnx("model.onnx", torch.ones(1, 32))

    def test_tensorrt_is_refused(self, module: BoringModel) -> None:
        with pytest.raises(NotImplementedError, match=r"to_tensorrt` is not offered.*to_onnx"):
            module.to_tensorrt()


def test_batch_hooks_of_a_datamodule_take_precedence(module: BoringModel) -> None:
    from torch_compat.core.datamodule import LightningDataModule

    class Data(LightningDataModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + 1

    attached = trainer()
    module.trainer = attached
    attached.datamodule = Data()
    assert module._apply_batch_transfer_handler(torch.zeros(1)).item() == 1
    attached.datamodule = LightningDataModule()
    assert module._apply_batch_transfer_handler(torch.zeros(1)).item() == 0


def test_transfer_hook_moves_nested_batches() -> None:
    batch = {"x": [torch.zeros(1), "text"], "y": (1, torch.ones(1))}
    moved = DataHooks().transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["x"][0].is_meta
    assert moved["x"][1] == "text"
    assert isinstance(moved["y"], tuple)
