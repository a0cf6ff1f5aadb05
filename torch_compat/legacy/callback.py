"""Callback as ``pytorch_lightning`` has it: today's, with the hooks and signatures of 1.3 to 1.6 accepted as well."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch_compat.callbacks.callback import Callback as CoreCallback
from torch_compat.run.era_signatures import callback_layouts, modernise


class Callback(CoreCallback):
    """A callback written against any era."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        modernise(cls, _is_ours, lambda self, args: args[1]._of_its_era, callback_layouts())
        _with_returned_state(cls)

    def on_configure_sharded_model(self, trainer: Any, pl_module: Any) -> None:
        """Called before the module's ``configure_sharded_model``."""

    def on_before_accelerator_backend_setup(self, trainer: Any, pl_module: Any) -> None:
        """Called before the strategy's ``setup_environment``."""

    def on_init_start(self, trainer: Any) -> None:
        """Called when the Trainer is made, before :meth:`on_init_end` of any callback."""

    def on_init_end(self, trainer: Any) -> None:
        """Called when the Trainer is made."""

    def on_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before each epoch's own hook."""

    def on_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after each epoch's own hook."""

    def on_batch_start(self, trainer: Any, pl_module: Any) -> None:
        """Called before each training batch."""

    def on_batch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after each training batch."""

    def on_pretrain_routine_start(self, trainer: Any, pl_module: Any) -> None:
        """Called after ``on_fit_start``."""

    def on_pretrain_routine_end(self, trainer: Any, pl_module: Any) -> None:
        """Called after a checkpoint's training state is restored."""


def _with_returned_state(cls: type) -> None:
    """Adapt hooks of 1.x: ``on_save_checkpoint`` returns the state, which ``on_load_checkpoint(…, callback_state)`` gets."""
    save, load = cls.__dict__.get("on_save_checkpoint"), cls.__dict__.get("on_load_checkpoint")
    if save is not None:

        @functools.wraps(save)
        def on_save_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> Any:
            state = save(self, trainer, pl_module, checkpoint)
            if state is not None:
                checkpoint.setdefault("callbacks", {})[self.state_key] = state
            return state

        cls.on_save_checkpoint = on_save_checkpoint
    if load is not None and "callback_state" in inspect.signature(load).parameters:

        @functools.wraps(load)
        def on_load_checkpoint(self: Any, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            states = checkpoint.get("callbacks", {})
            if self.state_key in states:
                load(self, trainer, pl_module, states[self.state_key])

        cls.on_load_checkpoint = on_load_checkpoint


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("torch_compat.") or kind is object
