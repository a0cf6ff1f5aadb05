"""The Accelerator: in 1.3 to 1.5 the hub between the loops and two plugins, in 2.x one kind of hardware.

API: ``pytorch_lightning.accelerators.Accelerator`` 1.3 and ``lightning.pytorch.accelerators.Accelerator`` 2.6, in one class:
the first is used where it is made with two plugins, the second without any.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torch_compat.utilities.device_transfer import move_data_to_device
from torch_compat.utilities.enums import GradClipAlgorithmType
from torch_compat.utilities.parts import of
from torch_compat.utilities.rank_zero import rank_zero_deprecation
from torch_compat.utilities.types import STEP_OUTPUT

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.legacy.precision_plugin import PrecisionPlugin
    from torch_compat.legacy.training_type_plugin import TrainingTypePlugin
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.registry import AcceleratorRegistryType

HARDWARE_MEMBERS = ("parse_devices", "get_parallel_devices", "auto_device_count", "is_available", "name")
"""What a class of 2.x must implement."""


class Accelerator:
    """Deals with one type of hardware.

    Args:
        precision_plugin: handles what is specific to the precision (1.3 to 1.5).
        training_type_plugin: handles what is specific to the training routine (1.3 to 1.5).

    On a mesh each member of 1.3 does what its page says through the plugin that owns it; the loops call those members that
    somebody overrides, at the documented moment, around or inside of the compiled step (``docs/compat/accelerator_1_3.md``).
    """

    def __init__(
        self, precision_plugin: PrecisionPlugin | None = None, training_type_plugin: TrainingTypePlugin | None = None
    ) -> None:
        self.precision_plugin: Any = precision_plugin
        self.training_type_plugin: Any = training_type_plugin
        self.optimizers: list[Optimizer] = []
        self.lr_schedulers: list[Any] = []
        self.optimizer_frequencies: list[int] = []

    @property
    def is_hub(self) -> bool:
        """Whether this is an accelerator of 1.3 to 1.5: one with its two plugins."""
        return self.training_type_plugin is not None

    # -- hardware (2.x) --------------------------------------------------------------------------------------------

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """``Trainer(devices=…)`` in the accelerator's own form."""
        raise NotImplementedError("an Accelerator of Lightning 2.x must implement parse_devices")

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        """The torch devices for the result of :meth:`parse_devices`."""
        raise NotImplementedError("an Accelerator of Lightning 2.x must implement get_parallel_devices")

    @staticmethod
    def auto_device_count() -> int:
        """The number of devices that ``devices="auto"`` means."""
        raise NotImplementedError("an Accelerator of Lightning 2.x must implement auto_device_count")

    @staticmethod
    def is_available() -> bool:
        """Whether the hardware is there."""
        raise NotImplementedError("an Accelerator of Lightning 2.x must implement is_available")

    @staticmethod
    def name() -> str:
        """The name under which ``Trainer(accelerator=…)`` knows the accelerator."""
        raise NotImplementedError("an Accelerator of Lightning 2.x must implement name")

    def setup_device(self, device: torch.device) -> None:
        """Called once per run with the process's root device, before anything is placed. JAX needs nothing."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """Figures of one device: name → number. Unknown hardware has none."""
        return {}

    @classmethod
    def register_accelerators(cls, accelerator_registry: AcceleratorRegistryType) -> None:
        """Registers the class under its name."""

    # -- set-up ----------------------------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Give the model to the training type plugin; nothing is placed."""
        self.training_type_plugin.connect(model)

    def setup_environment(self) -> None:
        """Joins the world and builds the mesh, before the user's ``setup`` hook."""
        if self.is_hub:
            self.training_type_plugin.setup_environment()

    def setup(self, trainer: Trainer, model: LightningModule | None = None) -> None:
        """Sets up the plugins and creates the optimizers (1.3). In 2.x, ``setup(trainer)``, nothing is left to do."""
        if not self.is_hub:
            return
        self.setup_training_type_plugin(model if model is not None else trainer.lightning_module)
        if not self.setup_optimizers_in_pre_dispatch:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_training_type_plugin(self, model: LightningModule) -> None:
        """Finishes the set-up of the training type plugin: parameters go to the mesh and keep their identity."""
        self.training_type_plugin.setup(model)

    def setup_precision_plugin(self) -> None:
        """Connects the precision plugin with model, optimizers and schedulers."""
        model, optimizers, schedulers = self.precision_plugin.connect(self.model, self.optimizers, self.lr_schedulers)
        self.model, self.optimizers, self.lr_schedulers = model, optimizers, schedulers

    def connect_training_type_plugin(self, plugin: TrainingTypePlugin, model: LightningModule) -> None:
        """Deprecated since 1.3: use :meth:`setup_training_type_plugin`."""
        rank_zero_deprecation(
            "`Accelerator.connect_training_type_plugin` was deprecated in v1.3: use `setup_training_type_plugin`"
        )
        self.training_type_plugin = plugin
        self.setup_training_type_plugin(model)

    def connect_precision_plugin(self, plugin: PrecisionPlugin) -> None:
        """Deprecated since 1.3: use :meth:`setup_precision_plugin`."""
        rank_zero_deprecation(
            "Accelerator method `connect_precision_plugin` was deprecated in v1.3: call `setup_precision_plugin`"
        )
        self.precision_plugin = plugin
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates optimizers and schedulers when fitting; their state is sharded like the parameters."""
        if trainer.state.fn is not None and trainer.state.fn != "fit":
            return
        made = self.training_type_plugin.init_optimizers(trainer, self.lightning_module)
        self.optimizers, self.lr_schedulers, self.optimizer_frequencies = made

    setup_optimizers_in_pre_dispatch: bool = of(
        "training_type_plugin.setup_optimizers_in_pre_dispatch",
        "Whether :meth:`setup_optimizers` is delayed to :meth:`pre_dispatch`.",
    )

    # -- around the run --------------------------------------------------------------------------------------------

    def pre_dispatch(self, trainer: Trainer) -> None:
        """Called before the run: sets up the optimizers, if they were delayed."""
        self.training_type_plugin.pre_dispatch()
        if self.setup_optimizers_in_pre_dispatch:
            self.setup_optimizers(trainer)
        self.precision_plugin.pre_dispatch()

    def dispatch(self, trainer: Trainer) -> None:
        """Begin the run in the plugins."""
        self.training_type_plugin.dispatch(trainer)
        self.precision_plugin.dispatch(trainer)

    def post_dispatch(self, trainer: Trainer) -> None:
        """Called after the run."""
        self.training_type_plugin.post_dispatch()
        self.precision_plugin.post_dispatch()

    def start_training(self, trainer: Trainer) -> None:
        """Runs the fit; its result is in :attr:`results`."""
        self.training_type_plugin.start_training(trainer)

    def start_evaluating(self, trainer: Trainer) -> None:
        """Runs a validation or test; its result is in :attr:`results`."""
        self.training_type_plugin.start_evaluating(trainer)

    def start_predicting(self, trainer: Trainer) -> None:
        """Runs a prediction; its result is in :attr:`results`."""
        self.training_type_plugin.start_predicting(trainer)

    results: Any = of("training_type_plugin.results", "The last run's result; set before :meth:`teardown`.")

    def teardown(self) -> None:
        """The end of a run: waits for the other processes, then the plugins let go of what they hold."""
        if self.is_hub:
            self.barrier("teardown")
            self.training_type_plugin.teardown()

    # -- model and devices -----------------------------------------------------------------------------------------

    model: torch.nn.Module = of("training_type_plugin.model", "The model, wrapped if a plugin wraps it.", settable=True)
    lightning_module: LightningModule = of("training_type_plugin.lightning_module", "The LightningModule, never wrapped.")
    root_device: torch.device = of(
        "training_type_plugin.root_device", "The device on which user code puts tensors on this process."
    )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int | None = None) -> Any:
        """The batch through ``transfer_batch_to_device`` and ``on_after_batch_transfer``, to ``device`` (the root device)."""
        model = self.lightning_module
        device = device or self.root_device
        if model is None:
            return move_data_to_device(batch, device)
        return model._apply_batch_transfer_handler(batch, device, dataloader_idx or 0)

    def to_device(self, step_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a step with their batch on the root device. The batch of a running step is on the mesh already."""
        return step_kwargs

    # -- steps -----------------------------------------------------------------------------------------------------

    def training_step(self, step_kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """The module's step, in the precision's context; the values of ``step_kwargs`` are passed by position."""
        step_kwargs = self.to_device(step_kwargs)
        with self.precision_plugin.train_step_context(), self.training_type_plugin.train_step_context():
            return self.training_type_plugin.training_step(*step_kwargs.values())

    def post_training_step(self) -> None:
        """Called after every training step."""
        self.training_type_plugin.post_training_step()

    def validation_step(self, step_kwargs: dict[str, Any]) -> STEP_OUTPUT | None:
        """Run ``validation_step``, see :meth:`training_step`."""
        step_kwargs = self.to_device(step_kwargs)
        with self.precision_plugin.val_step_context(), self.training_type_plugin.val_step_context():
            return self.training_type_plugin.validation_step(*step_kwargs.values())

    def test_step(self, step_kwargs: dict[str, Any]) -> STEP_OUTPUT | None:
        """Run ``test_step``, see :meth:`training_step`."""
        step_kwargs = self.to_device(step_kwargs)
        with self.precision_plugin.test_step_context(), self.training_type_plugin.test_step_context():
            return self.training_type_plugin.test_step(*step_kwargs.values())

    def predict_step(self, step_kwargs: dict[str, Any]) -> STEP_OUTPUT:
        """Run ``predict_step``, see :meth:`training_step`."""
        step_kwargs = self.to_device(step_kwargs)
        with self.precision_plugin.predict_step_context(), self.training_type_plugin.predict_step_context():
            return self.training_type_plugin.predict_step(*step_kwargs.values())

    def training_step_end(self, output: STEP_OUTPUT) -> STEP_OUTPUT:
        """Called at the end of the training step, inside what is differentiated: the loss it returns is minimised."""
        return self.training_type_plugin.training_step_end(output)

    def test_step_end(self, output: STEP_OUTPUT | None) -> STEP_OUTPUT | None:
        """Called at the end of the test step."""
        return self.training_type_plugin.test_step_end(output)

    def validation_step_end(self, output: STEP_OUTPUT | None) -> STEP_OUTPUT | None:
        """Called at the end of the validation step."""
        return self.training_type_plugin.validation_step_end(output)

    # -- optimization ----------------------------------------------------------------------------------------------

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer, optimizer_idx: int, should_accumulate: bool, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Gradients of the global batch's loss; the detached loss is returned."""
        return self.training_type_plugin._attached().differentiate_with_hooks(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, opt_idx: int, lambda_closure: Callable[[], Any], **kwargs: Any) -> None:
        """Step the optimizer, unless the precision plugin's ``pre_optimizer_step`` returns False.

        Args:
            optimizer: the one that steps.
            opt_idx: its index.
            lambda_closure: runs forward and backward.
        """
        if self.precision_plugin.pre_optimizer_step(self.lightning_module, optimizer, opt_idx, lambda_closure, **kwargs):
            self.run_optimizer_step(optimizer, opt_idx, lambda_closure, **kwargs)
        self.precision_plugin.post_optimizer_step(optimizer, opt_idx)
        self.training_type_plugin.post_optimizer_step(optimizer, opt_idx, **kwargs)

    def run_optimizer_step(
        self, optimizer: Optimizer, optimizer_idx: int, lambda_closure: Callable[[], Any], **kwargs: Any
    ) -> None:
        """The update itself."""
        self.training_type_plugin.optimizer_step(optimizer, lambda_closure=lambda_closure, **kwargs)

    def optimizer_zero_grad(self, current_epoch: int, batch_idx: int, optimizer: Optimizer, opt_idx: int) -> None:
        """Clears the gradients through the module's hook."""
        zero_grad = self.lightning_module.optimizer_zero_grad
        indexed = "optimizer_idx" in inspect.signature(zero_grad).parameters  # as 1.x has it
        zero_grad(current_epoch, batch_idx, optimizer, *([opt_idx] if indexed else []))

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clips the gradients of the optimizer's parameters."""
        self.precision_plugin.clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """The optimizer's ``state_dict()``, with what is on the mesh."""
        return self.training_type_plugin.optimizer_state(optimizer)

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        """``global_step`` after an optimizer step."""
        return self.training_type_plugin.update_global_step(total_batch_idx, current_global_step)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Called as training begins."""

    def on_train_epoch_end(self) -> None:
        """Called at the end of each training epoch."""

    def on_train_end(self) -> None:
        """Called as training ends."""

    # -- precision -------------------------------------------------------------------------------------------------

    @property
    def amp_backend(self) -> Any:
        """``"native"`` under mixed precision, else None."""
        return getattr(self.precision_plugin, "backend", None)

    precision: str | int = of("precision_plugin.precision", "The precision plugin's.")

    @property
    def scaler(self) -> Any:
        """The precision plugin's loss scaling, or None."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def rpc_enabled(self) -> bool:
        """Always False: there is no RPC plugin on a mesh."""
        return False

    # -- collectives -----------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""
        self.training_type_plugin.barrier(name=name)

    def broadcast(self, obj: object, src: int = 0) -> object:
        """``obj`` of process ``src`` on every process."""
        return self.training_type_plugin.broadcast(obj, src)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``(world_size, batch, …)`` of a ``(batch, …)`` tensor; in a step ``world_size`` is 1."""
        return self.training_type_plugin.all_gather(tensor, group=group, sync_grads=sync_grads)

    # -- data and checkpoints --------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """Wraps the loader after re-batching; what it returns is iterated."""
        return self.training_type_plugin.process_dataloader(dataloader)

    def lightning_module_state_dict(self) -> dict[str, Any | Tensor]:
        """The state of the model: global shapes, sharded until somebody reads."""
        return self.training_type_plugin.lightning_module_state_dict()

    def on_save(self, checkpoint: dict[str, Any | Tensor]) -> Mapping[str, Any | Tensor]:
        """The checkpoint dict before it is written."""
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str) -> None:
        """Every process writes its shards; returns when committed."""
        self.training_type_plugin.save_checkpoint(checkpoint, filepath)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Make parameters on their shards within the block.

        Raises:
            RuntimeError: an accelerator without plugins, as of 1.6 and later.
        """
        if not self.is_hub:
            raise RuntimeError(f"{type(self).__name__} has no plugin that shards: use trainer.strategy.model_sharded_context()")
        with self.training_type_plugin.model_sharded_context():
            yield

    call_configure_sharded_model_hook: bool = of(
        "training_type_plugin.call_configure_sharded_model_hook",
        "Whether ``configure_sharded_model`` is still to be called for this model.",
        settable=True,
    )
