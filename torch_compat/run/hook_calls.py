"""The one place that calls hooks, in Lightning's order: callbacks first, then the module."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch_compat.callbacks.callback import Callback
from torch_compat.callbacks.checkpoint import Checkpoint
from torch_compat.callbacks.early_stopping import EarlyStopping
from torch_compat.core.datamodule import LightningDataModule
from torch_compat.core.module import LightningModule
from torch_compat.run.hook_context import HookContext
from torch_compat.run.profiling import hook_action, profiled_hook
from torch_compat.run.states import TrainerFn
from torch_compat.utilities.exceptions import MisconfigurationException, SetupRuntimeError
from torch_compat.utilities.model_helpers import unwrapped
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.rank_zero import WarningCache

_DEFAULTS: dict[type, dict[str, Any]] = {}
"""Classes whose methods are defaults, not overrides, with their members as they were defined: one that was replaced since (by a
test's ``mock.patch``) is an override."""
_STRATEGY_HOOKS = frozenset(
    f"on_{stage}_{end}" for stage in ("train", "validation", "test", "predict") for end in ("start", "end")
)
_MONITORING = (Checkpoint, EarlyStopping)
_warnings = WarningCache()


def add_defaults(*bases: type) -> None:
    """Take the methods of base classes for defaults."""
    kinds = {kind for base in bases for kind in base.__mro__ if kind is not object} - _DEFAULTS.keys()
    _DEFAULTS.update({kind: dict(vars(kind)) for kind in kinds})


add_defaults(Callback, LightningModule, LightningDataModule)


def has_own(name: str, owner: Any) -> bool:
    """True when ``owner`` (a callback, module or datamodule) has another method ``name`` than its base class, so that calling it
    may do something.

    A base class's method that somebody has wrapped is another one. What is no instance of a base class (a mock, an object that
    passes calls on) has the methods that it answers to.
    """
    if owner is None:
        return False
    kinds = type(owner).__mro__
    if name in getattr(owner, "__dict__", {}):
        held = owner.__dict__[name]
        return held is not None and not _is_default(held, name, kinds)
    definer = next((kind for kind in kinds if name in kind.__dict__), None)
    if definer is None:
        return _DEFAULTS.keys().isdisjoint(kinds) and callable(getattr(owner, name, None))
    member = definer.__dict__[name]
    if definer in _DEFAULTS:
        return member is not _DEFAULTS[definer].get(name)
    base = next((kind for kind in kinds if kind in _DEFAULTS and name in kind.__dict__), None)
    taken_back = base is not None and member is base.__dict__[name]  # validation_step = Base.validation_step
    return member is not None and not taken_back


def is_overridden(name: str, owner: Any) -> bool:
    """True when a user has overridden the method ``name`` of ``owner``, as Lightning asks for it.

    A base class's method that is only wrapped, by a decorator with ``functools.wraps``, a partial or a mock, is not overridden.
    """
    if not has_own(name, owner):
        return False
    method = unwrapped(getattr(owner, name, None))
    return method is not None and not _is_default(method, name, type(owner).__mro__)


def _is_default(method: Any, name: str, kinds: Sequence[type]) -> bool:
    """Whether a method is a base class's own (``self.x = super().x``). As in stock, its code says."""
    code = getattr(method, "__code__", None)
    defaults = (_DEFAULTS[kind].get(name) for kind in kinds if kind in _DEFAULTS)
    return code is not None and any(code is getattr(default, "__code__", None) for default in defaults)


def module_hook(trainer: HookContext, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call the module's hook ``name``, and let ``self.log`` know that it runs."""
    module = trainer.lightning_module
    previous = _enter(module, name)
    try:
        function = getattr(module, name)
        if function is None:  # switched off: self.configure_callbacks = None
            return None
        with hook_action(trainer, module, name):
            return function(*args, **kwargs)
    finally:
        module.__dict__["_current_fx_name"] = previous


def zero_gradients(trainer: HookContext, batch_idx: Any, optimizer: Any) -> None:
    """``optimizer_zero_grad`` of an accelerator of 1.3 that has its own, else of the module."""
    if trainer.strategy.overrides("optimizer_zero_grad"):
        trainer.strategy.optimizer_zero_grad(trainer.current_epoch, batch_idx, optimizer)
    else:
        module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)


def callback_hooks(
    trainer: HookContext, name: str, *args: Any, only: Callable[[Callback], bool] | None = None, **kwargs: Any
) -> None:
    """Call hook ``name`` of every callback (or those that ``only`` admits), each with the trainer and the module first."""
    module = trainer._module
    previous = _enter(module, name) if module is not None else None
    try:
        for callback in trainer.callbacks:
            if (only is None or only(callback)) and has_own(name, callback):
                with hook_action(trainer, callback, name):
                    getattr(callback, name)(trainer, module, *args, **kwargs)
    finally:
        if module is not None:
            module.__dict__["_current_fx_name"] = previous


def old_hooks(trainer: HookContext, name: str, *args: Any) -> None:
    """Call a hook that Lightning 2.0 removed, of modules and callbacks that may be of any era."""
    if trainer.era is not None:
        trainer.era.fire(name, *args)


def hooks(trainer: HookContext, name: str, *args: Any) -> Any:
    """Call hook ``name`` of every callback, then of the module, whose result is returned, then of the strategy if it has one."""
    if trainer.era is not None:
        trainer.era.before(name)
    callback_hooks(trainer, name, *args)
    result = module_hook(trainer, name, *args)
    if name in _STRATEGY_HOOKS:
        getattr(trainer.strategy, name)(*args)
    if trainer.era is not None:
        trainer.era.after(name)
    return result


def on_train_epoch_end(trainer: HookContext) -> None:
    """Call the callbacks, the module, then the callbacks that monitor metrics, so that they see what the others logged."""
    if trainer.era is not None:
        trainer.era.before("on_train_epoch_end")
    callback_hooks(trainer, "on_train_epoch_end", only=lambda callback: not isinstance(callback, _MONITORING))
    module_hook(trainer, "on_train_epoch_end")
    trainer.strategy.on_train_epoch_end()
    callback_hooks(trainer, "on_train_epoch_end", only=lambda callback: isinstance(callback, _MONITORING))
    if trainer.era is not None:
        trainer.era.after("on_train_epoch_end")


def configure_model(trainer: HookContext) -> None:
    """``configure_sharded_model`` and ``configure_model``, where parameters are the strategy's from the beginning."""
    strategy, module = trainer.strategy, trainer.lightning_module
    wanted = [one for one in ("configure_sharded_model", "configure_model") if trainer.era or is_overridden(one, module)]
    if not wanted:
        return
    with strategy.tensor_init_context(), strategy.model_sharded_context():
        if strategy.call_configure_sharded_model_hook:
            old_hooks(trainer, "on_configure_sharded_model")
            if wanted[0] == "configure_sharded_model":
                module_hook(trainer, "configure_sharded_model")
            strategy.call_configure_sharded_model_hook = False
        if wanted[-1] == "configure_model":
            module_hook(trainer, "configure_model")


def setup_hooks(trainer: HookContext) -> None:
    """``setup(stage)`` of datamodule, callbacks and module, behind a barrier."""
    stage = _stage(trainer)
    for logger in trainer.loggers:
        getattr(logger, "experiment", None)  # made on first use: hooks may want its run id, or write beside it
    trainer.strategy.barrier("pre_setup")
    if trainer.datamodule is not None:
        with hook_action(trainer, trainer.datamodule, "setup"):
            trainer.datamodule.setup(stage=stage)
    callback_hooks(trainer, "setup", stage=stage)
    module_hook(trainer, "setup", stage=stage)
    trainer.strategy.barrier("post_setup")


def teardown_hooks(trainer: HookContext) -> None:
    """``teardown(stage)`` of datamodule, callbacks and module."""
    stage = _stage(trainer)
    if trainer.datamodule is not None:
        with hook_action(trainer, trainer.datamodule, "teardown"):
            trainer.datamodule.teardown(stage=stage)
    callback_hooks(trainer, "teardown", stage=stage)
    module_hook(trainer, "teardown", stage=stage)


def on_exception(trainer: HookContext, exception: BaseException) -> None:
    """Call ``on_exception`` of callbacks, then of the datamodule."""
    callback_hooks(trainer, "on_exception", exception)
    if trainer.datamodule is not None:
        with hook_action(trainer, trainer.datamodule, "on_exception"):
            trainer.datamodule.on_exception(exception)


def _stage(trainer: HookContext) -> TrainerFn:
    assert trainer.state.fn is not None
    return trainer.state.fn


def step(trainer: HookContext, name: str, batch: Any, *indices: Any) -> Any:
    """Call the module's step with the batch and as many of the indices as it accepts; through the strategy where it overrides it.

    Raises:
        SetupRuntimeError: the step does not accept the index of the dataloader, but there are several.
    """
    module, strategy, precision = trainer.lightning_module, trainer.strategy, trainer.precision_plugin
    args = _step_arguments(module, name, batch, indices)
    context = f"{_STAGE_OF_STEP[name]}_step_context"
    previous = _enter(module, name)
    try:
        with getattr(precision, context)() if overrides(precision, context) else contextlib.nullcontext():
            output = getattr(strategy if strategy.overrides(name) else module, name)(*args)
            return _step_end(trainer, f"{name}_end", output)
    finally:
        module.__dict__["_current_fx_name"] = previous


def _step_arguments(module: LightningModule, name: str, batch: Any, indices: Sequence[int]) -> tuple[Any, ...]:
    """The positional arguments that the module's step takes: the batch, and as many of its indices as it accepts."""
    accepted = _positional(getattr(module, name))
    loader = {"validation_step": "val", "test_step": "test", "predict_step": "predict"}.get(name)
    if loader is not None and len(indices) == 1 and _wants_loader(getattr(module, name)):
        raise SetupRuntimeError(
            f"You provided only a single `{loader}_dataloader`, but have included `dataloader_idx` in "
            f"`{type(module).__name__}.{name}()`: give it a default, `dataloader_idx=0`, or leave it out."
        )
    if len(indices) > 1 and accepted < 3:
        raise SetupRuntimeError(
            f"You provided multiple `{loader}_dataloader`, but no `dataloader_idx` argument in "
            f"`{type(module).__name__}.{name}()`, which tells it whose batch it has: give it `dataloader_idx=0`."
        )
    return (batch, *indices[: max(accepted - 1, 0)])


def _wants_loader(method: Any) -> bool:
    """Whether a step cannot be called without the index of its loader."""
    function = getattr(method, "__func__", None)
    return isinstance(function, types.FunctionType) and _has_loader_without_default(function)


@functools.cache
def _has_loader_without_default(function: types.FunctionType) -> bool:
    wanted = inspect.signature(function).parameters.get("dataloader_idx")
    return wanted is not None and wanted.default is wanted.empty


@functools.cache
def _accepted(function: Any) -> float:
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return math.inf
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _positional(method: Any) -> Any:
    """The number of positional arguments of a bound method, or of what was assigned in its place, which no cache is to keep."""
    function = getattr(method, "__func__", None)
    return min(_accepted(function) - 1 if function is not None else _accepted.__wrapped__(method), 1 << 10)


def _step_end(trainer: HookContext, name: str, output: Any) -> Any:
    """Call ``*_step_end`` of the module, then of an accelerator or plugin of 1.x, inside of the capture."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if trainer.era is not None and trainer.era.module is not None and overrides(module, name):
        module.__dict__["_current_fx_name"] = name
        ended = getattr(module, name)(output)
        output = output if ended is None else ended
    if strategy.overrides(name):
        output = getattr(strategy, name)(output)
    return output


_STAGE_OF_STEP = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}


_OLD_BATCH_HOOKS = {"on_train_batch_start": "on_batch_start", "on_train_batch_end": "on_batch_end"}


class BoundHook:
    """A per-batch hook, bound once per run to the callbacks and the module that override it."""

    def __init__(self, trainer: HookContext, name: str) -> None:
        module = trainer.lightning_module
        self.name = name
        self._module = module
        self._trainer = trainer
        self._callbacks = [profiled_hook(trainer, c, name) for c in trainer.callbacks if has_own(name, c)]
        self._own = profiled_hook(trainer, module, name) if has_own(name, module) else None
        self._strategy = getattr(trainer.strategy, name) if trainer.strategy.overrides(name) else None
        self._era = trainer.era
        self._collects = None if trainer.era is None else trainer.era.collects(name)
        self._old = _OLD_BATCH_HOOKS.get(name) if trainer.era is not None and trainer.era.has_batch_hooks else None

    def __bool__(self) -> bool:
        return bool(self._callbacks or self._collects or self._old) or self._own is not None or self._strategy is not None

    @property
    def asks_module(self) -> bool:
        """Whether the result is of the module's own hook."""
        return self._own is not None

    def __call__(self, *args: Any, module_args: Iterable[Any] | None = None) -> Any:
        """Call the callbacks with ``args``, the module with ``module_args``; give the module's result.

        These are the same by default; Lightning drops the module's ``dataloader_idx`` for a single dataloader.
        """
        module = self._module
        previous = _enter(module, self.name)
        try:
            if self._old == "on_batch_start":
                old_hooks(self._trainer, self._old)
            for hook in self._callbacks:
                hook(self._trainer, module, *args)
            result = None
            if self._own is not None:
                result = self._own(*(args if module_args is None else module_args))
            if self._strategy is not None and result != -1:
                self._strategy(*args)
            if self._collects is not None and self._era is not None:
                self._era.collect(self._collects, args[0], args[3] if len(args) > 3 else 0)
            if self._old == "on_batch_end":
                old_hooks(self._trainer, self._old)
            return result
        finally:
            module.__dict__["_current_fx_name"] = previous


class TransferHooks:
    """The three batch-transfer hooks, bound once per run where they are overridden; the others do nothing here.

    The precision plugin converts the batch before them. The datamodule's hook goes before the module's.
    """

    NAMES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

    def __init__(self, trainer: HookContext) -> None:
        self._trainer = trainer
        owners = (trainer.lightning_module, trainer.run_datamodule)
        self._names = [name for name in self.NAMES if any(has_own(name, owner) for owner in owners)]
        if trainer.run_datamodule is not None:
            for name in self._names:
                _warn_of_two_owners(name, *owners)
        self._through_strategy = trainer.strategy.overrides("batch_to_device")
        precision = trainer.precision_plugin  # it converts what is in containers: objects of a user's class keep their dtypes
        self._convert: Callable[[Any], Any] | None = precision.convert_input if precision.converts_input else None

    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        """Convert this process's rows of a batch to the run's precision, and pass them through the hooks."""
        trainer = self._trainer
        if self._convert is not None:
            batch = self._convert(batch)
        names = self._names
        if self._through_strategy:  # the strategy calls the two later hooks itself
            if names[:1] == ["on_before_batch_transfer"]:
                batch = self._call(names[0], batch, dataloader_idx)
            return trainer.strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
        for name in names:
            device = (trainer.strategy.root_device,) if name == "transfer_batch_to_device" else ()
            batch = self._call(name, batch, *device, dataloader_idx)
        return batch

    def _call(self, name: str, batch: Any, *args: Any) -> Any:
        if is_overridden(name, datamodule := self._trainer.run_datamodule):
            return profiled_hook(self._trainer, datamodule, name)(batch, *args)
        return module_hook(self._trainer, name, batch, *args)


def _warn_of_two_owners(name: str, module: Any, datamodule: Any) -> None:
    """Say once which batch-transfer hook is called where both a data module and the module have it."""
    if not is_overridden(name, module):
        return
    if is_overridden(name, datamodule):
        which, chosen = "both `LightningModule` and `LightningDataModule`.", "LightningDataModule"
    else:
        which, chosen = "`LightningModule` but have passed in a `LightningDataModule`.", "LightningModule"
    _warnings.warn(f"You have overridden `{name}` in {which} It will use the implementation from `{chosen}` instance.")


def _enter(module: LightningModule, name: str) -> str | None:
    previous = module.__dict__.get("_current_fx_name")
    module.__dict__["_current_fx_name"] = name
    return previous


# Stock's names, which strategies and loops of the user's call.
_call_callback_hooks = callback_hooks
_call_setup_hook = setup_hooks
_call_teardown_hook = teardown_hooks
_call_configure_model = configure_model


def _call_lightning_module_hook(trainer: HookContext, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    """:func:`module_hook`, of the Trainer's module."""
    if pl_module is not None and pl_module is not trainer.lightning_module:
        raise MisconfigurationException(f"_call_lightning_module_hook({hook_name!r}, pl_module=…): only the Trainer's own module")
    return module_hook(trainer, hook_name, *args, **kwargs)


def _call_lightning_datamodule_hook(trainer: HookContext, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the data module.

    Raises:
        TypeError: there is no data module.
    """
    if trainer.datamodule is None:
        raise TypeError("No `LightningDataModule` is available to call hooks on: pass `datamodule=…`")
    with hook_action(trainer, trainer.datamodule, hook_name):
        return getattr(trainer.datamodule, hook_name)(*args, **kwargs)


def _call_strategy_hook(trainer: HookContext, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the strategy; ``self.log`` in the module's step knows where it is."""
    module = trainer.lightning_module
    previous = _enter(module, hook_name)
    try:
        return getattr(trainer.strategy, hook_name)(*args, **kwargs)
    finally:
        module.__dict__["_current_fx_name"] = previous
