"""LightningModule as ``pytorch_lightning`` has it: today's, with the hooks and signatures of 1.3 to 1.6 accepted as well."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from torch_compat.core import module as core
from torch_compat.legacy.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch_compat.run.era_signatures import modernise
from torch_compat.stock_names import removed_names


class LightningModule(ModelHooks, DataHooks, CheckpointHooks, core.LightningModule):
    """A module written against any era. See ``docs/compat/hooks_1_5.md`` for what fires when."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        modernise(cls, _is_ours, lambda self, args: self._of_its_era)

    def _of_its_era(self, name: str, values: dict[str, Any]) -> Any:
        """The value of a parameter that only eras 1.x pass."""
        era = None if self._trainer is None else self._trainer.era
        if name == "outputs":
            return None if era is None else era.outputs("train")
        if name == "results":
            return None if era is None else era.predictions()
        optimizers = [] if self._trainer is None else self._trainer.optimizers
        optimizer = values.get("optimizer")
        current = getattr(optimizer, "_optimizer", optimizer)
        if name == "optimizer":
            return optimizers[0] if optimizers else None
        if name == "optimizer_idx":
            scheduled = getattr(values.get("scheduler"), "optimizer", current)
            return next((i for i, one in enumerate(optimizers) if one is scheduled), 0)
        raise KeyError(name)

    if not TYPE_CHECKING:  # a checker that saw it would take every name for a member

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)  # first: a submodule may have one of these names
            except AttributeError as error:
                if instead := removed_names.of_module(name):
                    error.args = (f"{error}{instead}",)
                raise

    # Signatures of 1.x, for `super()` calls in the old form.

    def optimizer_step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, epoch: int, batch_idx: int, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Makes one optimizer step: ``(epoch, batch_idx, optimizer, optimizer_closure)`` of 2.x, or
        ``(epoch, batch_idx, optimizer, optimizer_idx, optimizer_closure, on_tpu, using_native_amp, using_lbfgs)`` of 1.x.
        """
        closure = kwargs.get("optimizer_closure")
        closure = next((arg for arg in args if callable(arg)), closure)
        core.LightningModule.optimizer_step(self, epoch, batch_idx, optimizer, closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_idx: int = 0) -> None:
        """Clears gradients before backward."""
        core.LightningModule.optimizer_zero_grad(self, epoch, batch_idx, optimizer)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward of the loss: ``(loss)`` of 2.x or ``(loss, optimizer, optimizer_idx)`` of 1.x, then torch's arguments."""
        if args and (args[0] is None or isinstance(args[0], Optimizer)):
            args = args[2:]
        kwargs = {name: value for name, value in kwargs.items() if name not in ("optimizer", "optimizer_idx")}
        core.LightningModule.backward(self, loss, *args, **kwargs)

    def lr_scheduler_step(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps a scheduler: ``(scheduler, metric)`` of 2.x or ``(scheduler, optimizer_idx, metric)`` of 1.5."""
        metric = kwargs["metric"] if "metric" in kwargs else args[-1] if args else None
        core.LightningModule.lr_scheduler_step(self, scheduler, metric)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clips gradients: with or without 1.5's ``optimizer_idx`` after the optimizer."""
        if len(args) == 3:
            args = args[1:]
        kwargs.pop("optimizer_idx", None)
        core.LightningModule.configure_gradient_clipping(self, optimizer, *args, **kwargs)

    def add_to_queue(self, queue: Any) -> None:
        """Adds to the queue that brings results from a spawned process to its parent. (1.5)"""

    def get_from_queue(self, queue: Any) -> None:
        """Takes from the queue, in the parent, what :meth:`add_to_queue` put there. (1.5)"""

    def toggle_optimizer(self, optimizer: Any, optimizer_idx: int = 0) -> None:
        """Let only ``optimizer``'s parameters require gradients."""
        core.LightningModule.toggle_optimizer(self, optimizer)

    def untoggle_optimizer(self, optimizer: Any = None) -> None:
        """Undoes :meth:`toggle_optimizer`; 1.x passes the optimizer or its index."""
        if optimizer is None or isinstance(optimizer, int):
            optimizer = self.trainer.optimizers[optimizer or 0]
        core.LightningModule.untoggle_optimizer(self, optimizer)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(("torch_compat.", "torch.")) or kind is object
