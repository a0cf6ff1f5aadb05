"""Precision plugins: what dtype parameters, batches and the forward pass have. API: ``lightning.pytorch.plugins.precision``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from torch_compat.core.hooks import CheckpointHooks
from torch_compat.plugins.loss_scaling import of_grad_scaler
from torch_compat.utilities.enums import GradClipAlgorithmType
from torch_compat.utilities.exceptions import MisconfigurationException
from xlatrain.step.loss_scale import LossScaler, LossScaleState


class Precision(CheckpointHooks):
    """Full float32: nothing is converted.

    Attributes:
        precision: the name that ``Trainer(precision=…)`` takes.
        needs_x64: whether XLA must compute 64-bit types.
        scaler: dynamic loss scaling; its state is part of the training state.
        device: the torch device type whose autocast op lists apply.
    """

    precision: str = "32-true"
    device: str = "cpu"
    needs_x64: bool = False
    scaler: LossScaler | None = None
    _scaling: dict[str, Any] | None = None
    _grad_scaler: torch.amp.GradScaler | None = None

    def begin_scaling(self) -> LossScaleState:
        """The state with which loss scaling begins a run: that in which the last run with this plugin, or user's own, left it."""
        saved = self._scaling if self._grad_scaler is None else self._grad_scaler.state_dict()
        assert self.scaler is not None
        if saved is None:
            return self.scaler.init()
        self.scaler, state = LossScaler.from_state_dict(saved)
        return state

    def end_scaling(self, state: dict[str, Any]) -> None:
        """Keep the state of loss scaling of a run that has ended, in the user's ``GradScaler`` too."""
        self._scaling = state
        if self._grad_scaler is not None:
            self._grad_scaler.load_state_dict(state)

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module with its parameters in this precision."""
        return module

    def convert_input(self, data: Any) -> Any:
        """A batch, or a module's ``(args, kwargs)`` under Fabric, in this precision; only floating-point tensors change."""
        return data

    @property
    def converts_input(self) -> bool:
        """Whether :meth:`convert_input` does anything; every step skips it otherwise."""
        return getattr(self.convert_input, "__func__", None) is not Precision.convert_input

    def forward_context(self) -> AbstractContextManager[Any]:
        """The context of the user's step."""
        return contextlib.nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """The context of the creation of parameters."""
        return contextlib.nullcontext()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """The context of the creation of tensors that are no parameters."""
        return self.module_init_context()

    def convert_output(self, data: Any) -> Any:
        """Convert the output of Fabric's forward for the caller."""
        return data

    def train_step_context(self) -> AbstractContextManager[Any]:
        """The context of the training step, and under their own names of the other steps; by default :meth:`forward_context`."""
        return self.forward_context()

    val_step_context = test_step_context = predict_step_context = train_step_context

    def connect(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Called once the model is placed and the optimizers are there; gives them back, wrapped if a subclass wraps them."""
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Called before the hooks around a backward pass, on the host, with the real loss. The return value replaces nothing."""
        return tensor

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """Gradients of the loss. An override is captured: what it makes of the loss before it calls this is differentiated.

        Under Fabric ``model`` has no Trainer, or is None, and there is no ``optimizer``.
        """
        if getattr(model, "_trainer", None) is None:
            tensor.backward(*args, **kwargs)
        else:
            model.trainer.strategy.run_backward(tensor, *args, **kwargs)

    def post_backward(self, tensor: torch.Tensor, module: Any) -> torch.Tensor:
        """Called after the hooks around a backward pass, on the host; gradients can be read and changed."""
        return tensor.detach()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step ``optimizer``: the closure (forward and backward), the hooks, clipping, the update."""
        return model.trainer.strategy.make_update(optimizer, closure, **kwargs)

    def main_params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
        """The parameters that the optimizer updates."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def clip_gradients(
        self, optimizer: torch.optim.Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters in place; 0 clips nothing."""
        if clip_val <= 0:
            return
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip each value to ``[-clip_val, clip_val]``."""
        torch.nn.utils.clip_grad_value_(self.main_params(optimizer), clip_val, foreach=False)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Scale the gradients so that their norm over all parameters is at most ``clip_val``."""
        torch.nn.utils.clip_grad_norm_(self.main_params(optimizer), clip_val, foreach=False)

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing, where losses are not scaled.

        Raises:
            MisconfigurationException: they are: hooks see the real gradients where stock's do.
        """
        if self.scaler is not None:
            raise MisconfigurationException(
                f"{type(self).__name__}.unscale_gradients: the step unscales gradients itself; read and change the real ones in "
                "`on_before_optimizer_step` or `configure_gradient_clipping`"
            )

    def state_dict(self) -> dict[str, Any]:
        """The state that a subclass wants in checkpoints, under its class name.

        With loss scaling, the scaler's state at the end of the last run.
        """
        return self._scaling or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave."""

    def teardown(self) -> None:
        """The end of a run."""


def converted(data: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors of ``data``, a tensor or a collection, in ``dtype``."""
    return apply_to_collection(data, torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class MixedPrecision(Precision):
    """Float32 parameters; the forward pass runs under ``torch.autocast``, whose op lists decide what is computed in ``dtype``.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: the torch device type whose autocast op lists apply; the step is captured as a CPU step.
        scaler: loss scaling for ``"16-mixed"``: its options and first scale; default: ``torch.amp.GradScaler``'s.

    Raises:
        MisconfigurationException: a scaler for ``"bf16-mixed"``.
        ValueError: another precision, or ``GradScaler(enabled=False)``.
    """

    def __init__(self, precision: str, device: str = "cpu", scaler: LossScaler | torch.amp.GradScaler | None = None) -> None:
        if precision not in ("bf16-mixed", "16-mixed"):
            raise ValueError(f"Passed `MixedPrecision(precision={precision!r})`. Precision must be '16-mixed' or 'bf16-mixed'")
        if scaler is not None and precision == "bf16-mixed":
            raise MisconfigurationException(
                "`precision='bf16-mixed'` does not use a scaler: bfloat16 has float32's range; leave it out"
            )
        self.precision = precision
        self.device = device
        self._grad_scaler = scaler if isinstance(scaler, torch.amp.GradScaler) else None
        if isinstance(scaler, torch.amp.GradScaler):
            scaler = of_grad_scaler(scaler)
        self.scaler = (scaler or LossScaler()) if precision == "16-mixed" else None

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-mixed" else torch.float16

    def forward_context(self) -> AbstractContextManager[Any]:
        # The weight cache would keep traced casts beyond the capture.
        return torch.autocast(self.device, dtype=self.dtype, cache_enabled=False)


class HalfPrecision(Precision):
    """Parameters, batches and computation in bfloat16 or float16 (``"bf16-true"``, ``"16-true"``)."""

    def __init__(self, precision: str = "16-true") -> None:
        if precision not in ("bf16-true", "16-true"):
            raise ValueError(f"precision {precision!r}; HalfPrecision takes 'bf16-true' or '16-true'")
        self.precision = precision

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16-true" else torch.float16

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.dtype)

    def convert_input(self, data: Any) -> Any:
        return converted(data, self.dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.dtype)

    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.dtype)


class DoublePrecision(Precision):
    """Training in float64 (``"64-true"``); needs JAX's 64-bit types, which the Trainer enables."""

    precision = "64-true"
    needs_x64 = True

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.double()

    def convert_input(self, data: Any) -> Any:
        return converted(data, torch.float64)

    def forward_context(self) -> AbstractContextManager[Any]:
        return default_dtype(torch.float64)

    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(torch.float64)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` torch's default in the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
