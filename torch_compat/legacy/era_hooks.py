"""Hooks that Lightning 2.0 removed, fired around today's hooks of the same moment."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch_compat.legacy.callback import Callback
from torch_compat.legacy.module import LightningModule
from torch_compat.run.era_signatures import accepts
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_STAGES = {"train": "training", "validation": "validation", "test": "test"}
_BEFORE = {f"on_{stage}_epoch_start": ("on_epoch_start",) for stage in (*_STAGES, "predict")}
_AFTER = {f"on_{stage}_epoch_end": ("on_epoch_end",) for stage in (*_STAGES, "predict")}
_EPOCH_ENDS = {f"on_{stage}_epoch_end": stage for stage in _STAGES}


class EraHooks:
    """Hooks of ``pytorch_lightning``, of any era, which the loops fire for its modules and callbacks.

    Args:
        trainer: the Trainer; its module or one of its callbacks comes through ``pytorch_lightning``.

    Attributes:
        module: the module, if it comes through ``pytorch_lightning``.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        self.module: Any = module if isinstance(module, LightningModule) else None
        self._told: set[str] = set()
        self._outputs: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))

    # -- hooks -----------------------------------------------------------------------------------------------------

    def fire(self, name: str, *args: Any) -> None:
        """A removed hook: of the callbacks, then of the module, that override it."""
        from torch_compat.run import hook_calls as call

        trainer = self._trainer
        call.callback_hooks(trainer, name, *args)
        if self.module is not None and overrides(self.module, name):
            call.module_hook(trainer, name, *args)

    def before(self, name: str) -> None:
        """Fire the removed hooks that came before a hook that is still there."""
        if (stage := _EPOCH_ENDS.get(name)) is not None:
            self._epoch_end(stage)
        for old in _BEFORE.get(name, ()):
            self.fire(old)

    def after(self, name: str) -> None:
        """Fire the removed hooks that came after a hook that is still there."""
        for old in _AFTER.get(name, ()):
            self.fire(old)
        if (stage := _EPOCH_ENDS.get(name)) is not None:
            self._outputs.pop(stage, None)

    @property
    def has_batch_hooks(self) -> bool:
        """Whether a callback has ``on_batch_start`` or ``on_batch_end``."""
        return any(
            overrides(callback, name) for callback in self._trainer.callbacks for name in ("on_batch_start", "on_batch_end")
        )

    # -- outputs of an epoch ---------------------------------------------------------------------------------------

    def collects(self, hook: str) -> str | None:
        """The stage whose outputs are wanted, of ``on_{stage}_batch_end``; else None."""
        stage = hook.removeprefix("on_").removesuffix("_batch_end")
        if hook != f"on_{stage}_batch_end" or stage not in _STAGES:
            return None
        if self.module is not None and overrides(self.module, f"{_STAGES[stage]}_epoch_end"):
            return stage
        owners: list[Any] = [one for one in (self.module, *self._trainer.callbacks) if overrides(one, "on_train_epoch_end")]
        wanted = stage == "train" and any(accepts(one.on_train_epoch_end, "outputs") for one in owners)
        return stage if wanted else None

    def collect(self, stage: str, output: Any, dataloader_idx: int) -> None:
        """Keep what a batch gave; nothing is read from the device yet."""
        if output is not None and output != {}:
            self._outputs[stage][dataloader_idx].append(output)

    def outputs(self, stage: str) -> list[Any]:
        """The outputs of the epoch's batches: flat for one loader, a list for each of several."""
        kept = self._outputs.get(stage, {})
        if stage == "train":
            return self._by_optimizer([output for outputs in kept.values() for output in outputs])
        count = self._loaders(stage)
        lists = [kept.get(index, []) for index in range(count)]
        return lists[0] if count == 1 else lists

    def _by_optimizer(self, outputs: list[Any]) -> list[Any]:
        """A list for each of several optimizers, as 1.x has it: a batch's outputs came together."""
        several = len(self._trainer.optimizers) > 1 and self._trainer.lightning_module.automatic_optimization
        if not several or (self.module is not None and accepts(self.module.training_epoch_end, "new_format")):
            return outputs
        return [list(of_one) for of_one in zip(*outputs, strict=True)]

    def predictions(self) -> Any:
        """The outputs of ``predict_step`` so far: a list for each loader, as 1.x's ``on_predict_epoch_end`` gets them."""
        return self._trainer.predict_loop._predictions

    def _loaders(self, stage: str) -> int:
        loop = self._trainer.validate_loop if stage == "validation" else self._trainer.test_loop
        return max(1, len(loop.max_batches))

    def _epoch_end(self, stage: str) -> None:
        from torch_compat.run import hook_calls as call

        name = f"{_STAGES[stage]}_epoch_end"
        if self.module is not None and overrides(self.module, name):
            self._check_returned(name, call.module_hook(self._trainer, name, self.outputs(stage)))

    def _check_returned(self, name: str, returned: Any) -> None:
        if returned is None:
            return
        kind = type(self.module).__name__
        if name == "training_epoch_end":
            raise MisconfigurationException(
                f"`{kind}.training_epoch_end` expects a return of None; it returned {type(returned).__name__}. HINT: remove the "
                "return statement in training_epoch_end, and log with self.log"
            )
        if name not in self._told:
            self._told.add(name)
            rank_zero_warn(
                f"`{kind}.{name}` should not return anything; its result ({type(returned).__name__}) is not used. To log, "
                "use self.log(…) or self.log_dict(…)"
            )


def init_hooks(trainer: Trainer) -> None:
    """Call ``on_init_start`` and ``on_init_end`` of callbacks that come through ``pytorch_lightning``."""
    callbacks: list[Any] = [callback for callback in trainer.callbacks if isinstance(callback, Callback)]
    for name in ("on_init_start", "on_init_end"):
        for callback in callbacks:
            getattr(callback, name)(trainer)


def era_hooks(trainer: Trainer) -> EraHooks | None:
    """The hooks of 1.x for this run; None where no module or callback came through ``pytorch_lightning``.

    Raises:
        MisconfigurationException: the module asks for truncated back-propagation through time as 1.x did it.
    """
    _refuse_truncated_backpropagation(trainer.lightning_module)
    legacy = isinstance(trainer.lightning_module, LightningModule) or any(isinstance(one, Callback) for one in trainer.callbacks)
    return EraHooks(trainer) if legacy else None


def _refuse_truncated_backpropagation(module: Any) -> None:
    if not isinstance(module, LightningModule):
        return
    if getattr(module, "truncated_bptt_steps", 0) or overrides(module, "tbptt_split_batch"):
        raise MisconfigurationException(
            f"{type(module).__name__}: truncated back-propagation through time (truncated_bptt_steps, tbptt_split_batch) was "
            "removed in Lightning 2.0 and is not offered: set self.automatic_optimization = False, split the batch along time in "
            "training_step, and for each part call self.manual_backward(loss), optimizer.step() and hiddens.detach()"
        )
