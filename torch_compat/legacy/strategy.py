"""Plugins of 1.3 to 1.5 behind today's strategy seam: loops call the strategy, which calls the accelerator and its plugins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torch_compat.accelerators.accelerator import Accelerator
from torch_compat.legacy.precision_plugin import PrecisionPlugin
from torch_compat.legacy.training_type_plugin import TrainingTypePlugin
from torch_compat.plugins.precision import Precision
from torch_compat.step.update.schedulers import refuse_frequencies, scheduler_configs
from torch_compat.strategies.parallel import OnMesh
from torch_compat.strategies.strategy import Strategy
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import ProcessCollectives
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.parts import of
from torch_compat.utilities.types import STEP_OUTPUT

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

# For each member of the strategy what makes it the user's: members of the accelerator (a), of the training type plugin (t) and
# of the precision plugin (p). Where a name stands for itself in all three it is left out.
_FED_BY: dict[str, tuple[tuple[str, str], ...]] = {
    "training_step": (("a", "training_step"), ("a", "to_device"), ("t", "training_step"), ("t", "train_step_context")),
    "validation_step": (("a", "validation_step"), ("a", "to_device"), ("t", "validation_step"), ("t", "val_step_context")),
    "test_step": (("a", "test_step"), ("a", "to_device"), ("t", "test_step"), ("t", "test_step_context")),
    "predict_step": (("a", "predict_step"), ("a", "to_device"), ("t", "predict_step"), ("t", "predict_step_context")),
    "backward": (("a", "backward"), ("p", "backward")),
    "pre_backward": (("t", "pre_backward"), ("p", "pre_backward")),
    "post_backward": (("t", "post_backward"), ("p", "post_backward")),
    "optimizer_step": (
        ("a", "optimizer_step"), ("a", "run_optimizer_step"), ("t", "optimizer_step"), ("p", "pre_optimizer_step"),
        ("p", "post_optimizer_step"),
    ),
    "post_optimizer_step": (("t", "post_optimizer_step"),),
    "load_checkpoint": (("t", "load_checkpoint_file"),),
    "clip_gradients": (("a", "clip_gradients"),),
}  # fmt: skip


class PluginStrategy(OnMesh):
    """Calls an accelerator of 1.3 to 1.5, which calls its training type plugin and its precision plugin.

    Args:
        hub: the accelerator, with both plugins.
    """

    strategy_name = "training_type_plugin"

    def __init__(self, hub: Accelerator) -> None:
        super().__init__(precision_plugin=hub.precision_plugin if isinstance(hub.precision_plugin, Precision) else None)
        self.hub = hub
        self.plugin: TrainingTypePlugin = hub.training_type_plugin
        self.rules = self.plugin.rules
        self.checkpoint_io = getattr(self.plugin, "checkpoint_io", None)
        self.cluster_environment = getattr(self.plugin, "cluster_environment", None)
        self.frequencies: list[int] = []
        self._stage: Callable[[], Any] | None = None
        self._in_place = False
        self.plugin._strategy = self

    # -- which members are the user's ------------------------------------------------------------------------------

    def overrides(self, name: str) -> bool:
        owners = {"a": self.hub, "t": self.plugin, "p": self.precision_plugin}
        members = _FED_BY.get(name) or (("a", name), ("t", name))
        return any(overrides(owners[who], member) for who, member in members)

    def captured_owners(self) -> dict[str, Any]:
        owners = {
            "trainer.accelerator": self.hub,
            "trainer.training_type_plugin": self.plugin,
            "trainer.precision_plugin": self.precision_plugin,
        }
        return {name: owner for name, owner in owners.items() if not type(owner).__module__.startswith("torch_compat.")}

    @property
    def accelerator(self) -> Accelerator | None:
        """The user's accelerator of 1.3 to 1.5, else one of the hardware's class: either has the plugins."""
        return self.hub if self._accelerator is not None or type(self.hub) is not Accelerator else None

    @accelerator.setter
    def accelerator(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        if type(self.hub) is Accelerator:
            self.hub = type(accelerator)(self.hub.precision_plugin, self.plugin)

    @property
    def drives_one_device(self) -> bool:
        """Whether the plugin is none of ours and has its own root device: then one device, unless ``devices`` says more."""
        return overrides(self.plugin, "root_device") and not isinstance(self.plugin, ProcessCollectives)

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin
        if not isinstance(self.hub.precision_plugin, PrecisionPlugin):
            self.hub.precision_plugin = _in_old_form(precision_plugin)

    mesh_axes = of("plugin.mesh_axes")
    root_device: torch.device = of("hub.root_device")
    is_global_zero: bool = of("plugin.is_global_zero")

    # -- what the plugins reach the mesh through -------------------------------------------------------------------

    def make_optimizers(self) -> None:
        """Calls ``configure_optimizers``, and compiles the update; the parameters are placed by then."""
        self.model_to_device()
        if self._mesh_run.executor is not None:
            self._mesh_run.executor.setup_optimizers()

    def born_sharded(self) -> contextlib.AbstractContextManager[Any]:
        """The context of the creation of modules: parameters made inside get their values on their shards."""
        return super().model_sharded_context()

    def run(self) -> Any:
        """The stage of this run."""
        assert self._stage is not None
        return self._stage()

    def state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, with what is on the mesh."""
        return super().optimizer_state(optimizer)

    def reduce_boolean(self, decision: bool) -> bool:
        """Reduce a decision: True if every process says True."""
        return super().reduce_boolean_decision(decision)

    def write(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        """Writes a checkpoint dict."""
        super().save_checkpoint(checkpoint, filepath)

    def read(self, path: str | Path) -> dict[str, Any]:
        """Reads a checkpoint dict."""
        return super().load_checkpoint(path)

    def restore_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers their state on the mesh."""
        super().load_optimizer_state_dict(checkpoint)

    # -- set-up and end --------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        if model is not self.lightning_module:
            self.hub.call_configure_sharded_model_hook = True
        self._in_place = False
        super().connect(model)
        self.hub.connect(model)

    call_configure_sharded_model_hook: bool = of("hub.call_configure_sharded_model_hook", settable=True)

    def setup_environment(self) -> None:
        assert self.mesh is not None
        self.hub.setup_environment()

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        self.hub.setup(trainer, self.lightning_module)
        self._take_optimizers(trainer)
        self.model_to_device()

    def model_to_device(self) -> None:
        if not self._in_place:
            self._in_place = True
            self.plugin.model_to_device()
            super().model_to_device()

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        with self.hub.model_sharded_context():
            yield

    def pre_dispatch(self, trainer: Trainer) -> None:
        self.hub.pre_dispatch(trainer)
        self._take_optimizers(trainer)

    def _take_optimizers(self, trainer: Trainer) -> None:
        """Optimizers and schedulers that the accelerator or a plugin made itself come before the module's."""
        hub = self.hub
        if trainer.state.fn != "fit" or not hub.optimizers:
            return
        refuse_frequencies(hub.optimizer_frequencies)
        if hub.optimizers != self.optimizers:
            self.optimizers = list(hub.optimizers)
        trainer.lr_scheduler_configs = scheduler_configs(hub.lr_schedulers, trainer)

    def run_stage(self, trainer: Trainer, stage: Callable[[], Any]) -> Any:
        def dispatched() -> Any:
            self.hub.dispatch(trainer)
            return stage()

        self._stage = dispatched
        try:
            starts = {"fit": self.hub.start_training, "predict": self.hub.start_predicting}
            starts.get(str(getattr(trainer.state.fn, "value", "")), self.hub.start_evaluating)(trainer)
            results = self.hub.results
            self.hub.post_dispatch(trainer)
        finally:
            self._stage = None
        return results

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.hub.training_step(_by_name(args, kwargs))

    post_training_step = of("hub.post_training_step")

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.hub.validation_step(_by_name(args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        return self.hub.test_step(_by_name(args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.hub.predict_step(_by_name(args, kwargs))

    training_step_end = of("hub.training_step_end")
    validation_step_end = of("hub.validation_step_end")
    test_step_end = of("hub.test_step_end")

    # -- optimization ----------------------------------------------------------------------------------------------

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not overrides(self.hub, "backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        return self.hub.backward(closure_loss, optimizer, self._index(optimizer), self._accumulates(), *args, **kwargs)  # pyright: ignore[reportArgumentType]

    def differentiate_with_hooks(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass behind the accelerator's ``backward``."""
        return super().backward(loss, optimizer, *args, **kwargs)

    def _differentiate(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        plugin: Any = self.hub.precision_plugin
        should_accumulate = overrides(plugin, "backward") and self._accumulates()
        plugin.backward(self.lightning_module, loss, optimizer, self._index(optimizer), should_accumulate, *args, **kwargs)

    def _accumulates(self) -> bool:
        """Whether the batch only adds its gradients; read in a step that is captured: another variant where it is not so."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop.accumulates()

    def _index(self, optimizer: Optimizer | None) -> int:
        return next((i for i, one in enumerate(self.optimizers) if one is optimizer), 0)

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.plugin.pre_backward(closure_loss)
        plugin = self.hub.precision_plugin
        _check_loss(plugin, plugin.pre_backward(self.lightning_module, closure_loss), closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.hub.precision_plugin.post_backward(self.lightning_module, closure_loss)
        self.plugin.post_backward(closure_loss)

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        plain: Any = getattr(optimizer, "_optimizer", optimizer)
        self.hub.optimizer_zero_grad(current_epoch, batch_idx, optimizer, self._index(plain))

    clip_gradients = of("hub.clip_gradients")

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any | None = None, **kwargs: Any) -> Any:
        return self.hub.optimizer_step(optimizer, self._index(optimizer), closure, **kwargs)

    def pre_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0, **kwargs: Any) -> None:
        self.plugin.pre_optimizer_step(optimizer, optimizer_idx, **kwargs)

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int = 0, **kwargs: Any) -> None:
        if not self.overrides("optimizer_step"):  # else the accelerator's optimizer_step calls it
            self.plugin.post_optimizer_step(optimizer, optimizer_idx, **kwargs)

    update_global_step = of("hub.update_global_step")
    optimizer_state = of("hub.optimizer_state")

    # -- data ------------------------------------------------------------------------------------------------------

    batch_to_device = of("hub.batch_to_device")
    process_dataloader = of("hub.process_dataloader")
    on_reset_train_dataloader = of("plugin.on_reset_train_dataloader")
    on_reset_val_dataloader = of("plugin.on_reset_val_dataloader")
    on_reset_test_dataloader = of("plugin.on_reset_test_dataloader")
    on_reset_predict_dataloader = of("plugin.on_reset_predict_dataloader")

    # -- collectives -----------------------------------------------------------------------------------------------

    barrier = of("hub.barrier")
    broadcast = of("hub.broadcast")
    all_gather = of("hub.all_gather")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.plugin.reduce(tensor, reduce_op=reduce_op) if group is None else self.plugin.reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if all:
            return self.plugin.reduce_boolean_decision(decision)
        return not self.plugin.reduce_boolean_decision(not decision)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    lightning_module_state_dict = of("hub.lightning_module_state_dict")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise MisconfigurationException(
                "save_checkpoint(storage_options=…) is of Lightning 2.x; plugins of 1.x know no such argument"
            )
        self.hub.save_checkpoint(self.hub.on_save(checkpoint), str(filepath))  # pyright: ignore[reportArgumentType]

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if overrides(self.plugin, "load_checkpoint_file"):
            return self.plugin.load_checkpoint_file(str(checkpoint_path))
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.plugin.load_model_state_dict(checkpoint)

    load_optimizer_state_dict = of("plugin.load_optimizer_state_dict")

    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.plugin.should_rank_save_checkpoint:
            super().remove_checkpoint(filepath)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        self.hub.on_train_start()
        self.plugin.on_train_start()

    on_train_epoch_end = of("hub.on_train_epoch_end")

    def on_train_end(self) -> None:
        self.hub.on_train_end()
        self.plugin.on_train_end()

    on_validation_start = of("plugin.on_validation_start")
    on_validation_end = of("plugin.on_validation_end")
    on_test_start = of("plugin.on_test_start")
    on_test_end = of("plugin.on_test_end")
    on_predict_start = of("plugin.on_predict_start")
    on_predict_end = of("plugin.on_predict_end")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.plugin.on_train_batch_start(batch, batch_idx, 0)


def strategy_of_plugins(given: Accelerator | TrainingTypePlugin) -> Strategy:
    """The strategy for what a user of eras 1.3 to 1.5 gives the Trainer.

    Raises:
        TypeError: a plugin of another era, by name.
    """
    if isinstance(given, TrainingTypePlugin):
        return PluginStrategy(Accelerator(None, given))
    plugin = given.training_type_plugin
    if not isinstance(plugin, TrainingTypePlugin):
        raise TypeError(
            f"{type(given).__name__}(training_type_plugin={type(plugin).__name__}()): an Accelerator with plugins is of eras "
            "1.3 to 1.5 and takes a TrainingTypePlugin; give a Strategy to Trainer(strategy=…)"
        )
    if given.precision_plugin is not None and not isinstance(given.precision_plugin, PrecisionPlugin):
        raise TypeError(
            f"{type(given).__name__}(precision_plugin={type(given.precision_plugin).__name__}()): an Accelerator with plugins "
            "is of eras 1.3 to 1.5 and takes a PrecisionPlugin; give a Precision to Trainer(plugins=[…])"
        )
    return PluginStrategy(given)


def _check_loss(plugin: Any, given: Any, loss: Tensor) -> None:
    """``pre_backward`` of 1.x may return another loss; by then its gradients exist.

    Raises:
        MisconfigurationException: the value that ``pre_backward`` returned is another.
    """
    if given is None or given is loss or torch.equal(given.detach().nan_to_num(), loss.detach().nan_to_num()):
        return
    raise MisconfigurationException(
        f"{type(plugin).__name__}.pre_backward returned another loss ({float(given)}; it was given {float(loss)}), but by "
        "then the gradients are computed: override `backward` of the precision plugin, which is captured, or scale the loss in "
        "training_step"
    )


def _by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A step's arguments as 1.3's ``step_kwargs``."""
    names: Iterator[str] = iter(("batch", "batch_idx", "dataloader_idx", *(f"argument_{i}" for i in range(len(args)))))
    return {**{next(names): value for value in args}, **kwargs}


def _in_old_form(precision: Precision | None) -> PrecisionPlugin:
    """A precision of 2.x as an accelerator of 1.3 to 1.5 calls it; dtypes are the run's affair."""
    plugin = PrecisionPlugin()
    if precision is not None:
        plugin.precision = precision.precision
        plugin.scaler = precision.scaler
    return plugin
