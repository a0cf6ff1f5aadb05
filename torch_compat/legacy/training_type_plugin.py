"""TrainingTypePlugin of 1.4 and 1.5. API: ``pytorch_lightning.plugins.training_type.TrainingTypePlugin``."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torch_compat.core.hooks import RunHooks
from xlatrain.mesh.sharding import ShardingRules

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.strategies.strategy import Strategy
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.registry import StrategyRegistryType

TBroadcast = TypeVar("TBroadcast")


class Plugin:
    """The common base of training type and precision plugins: hooks around the run, contexts around the steps."""

    def pre_dispatch(self) -> None:
        """Called before the run."""

    def dispatch(self, trainer: Trainer) -> None:
        """Called as the run begins."""

    def post_dispatch(self) -> None:
        """Called after the run."""

    @contextlib.contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The context of the training step, and under their own names of the other steps."""
        yield

    val_step_context = test_step_context = predict_step_context = train_step_context


class TrainingTypePlugin(RunHooks, Plugin, ABC):
    """Changes the behaviour of the training, validation and test loop.

    Given as ``Trainer(plugins=[…])`` (or ``strategy=``, as 1.5 has it). The loops call what a subclass overrides, at the
    documented moment, around or inside of the compiled step. What it does not override is done by the mesh.

    Attributes:
        rules: how parameters are split over the mesh.
    """

    rules: ShardingRules = ShardingRules()

    def __init__(self) -> None:
        self._model: Module | None = None
        self._results: Any = None
        self._call_configure_sharded_model_hook = True
        self._strategy: Strategy | None = None

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        """Mesh axis → size for this many devices; by default all in one ``data`` axis."""
        return {"data": n_devices}

    # -- abstract --------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def on_gpu(self) -> bool:
        """Whether the mesh is made of GPUs."""

    @property
    @abstractmethod
    def on_tpu(self) -> bool:
        """Whether the mesh is made of TPUs."""

    @property
    @abstractmethod
    def root_device(self) -> torch.device:
        """The device on which user code puts tensors on this process."""

    @abstractmethod
    def model_to_device(self) -> None:
        """Called before parameters and buffers go to the mesh by rule; ``on_post_move_to_device`` follows."""

    @property
    @abstractmethod
    def is_global_zero(self) -> bool:
        """Whether this is process 0."""

    @abstractmethod
    def reduce(self, tensor: Tensor | Any, *args: Any, **kwargs: Any) -> Tensor | Any:
        """Reduces over processes; in a step, whose values are global, identity is right."""

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Waits for all processes."""

    @abstractmethod
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """``obj`` of process ``src`` on every process."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every process, stacked."""

    @abstractmethod
    def teardown(self) -> None:
        """The end of a run: release what the plugin holds. The mesh's memory is released after it."""

    # -- set-up ----------------------------------------------------------------------------------------------------

    def connect(self, model: Module) -> None:
        """Takes the model; nothing is placed."""
        self.model = model

    def setup_environment(self) -> None:
        """Called before the user's ``setup`` hook: the world is joined and the mesh is built by then."""

    def setup(self, model: Module) -> None:
        """Finishes the set-up: parameters go to the mesh."""
        self._attached().model_to_device()

    def init_optimizers(self, trainer: Trainer, model: LightningModule) -> tuple[list[Optimizer], list[Any], list[int]]:
        """Creates optimizers and schedulers, and the frequencies of the optimizers."""
        strategy = self._attached()
        strategy.make_optimizers()
        return trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs], strategy.frequencies

    @property
    def setup_optimizers_in_pre_dispatch(self) -> bool:
        """Whether the creation of optimizers is delayed to ``pre_dispatch``."""
        return False

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """The context of ``configure_sharded_model``: parameters made inside get their values on their shards."""
        with self._attached().born_sharded():
            yield

    @property
    def call_configure_sharded_model_hook(self) -> bool:
        """Whether ``configure_sharded_model`` is still to be called; False once it has run for this model."""
        return self._call_configure_sharded_model_hook

    @call_configure_sharded_model_hook.setter
    def call_configure_sharded_model_hook(self, mode: bool) -> None:
        self._call_configure_sharded_model_hook = mode

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Module | None:
        """The model, wrapped if the plugin wraps it."""
        return self._model

    @model.setter
    def model(self, new_model: Module | None) -> None:
        self._model = new_model

    @property
    def lightning_module(self) -> LightningModule:
        """The LightningModule, never wrapped."""
        if self._strategy is not None and self._strategy.lightning_module is not None:
            return self._strategy.lightning_module
        return self._model  # pyright: ignore[reportReturnType]

    # -- the run ---------------------------------------------------------------------------------------------------

    def start_training(self, trainer: Trainer) -> None:
        """Runs the fit; its result is in :attr:`results`."""
        self._results = self._attached().run()

    def start_evaluating(self, trainer: Trainer) -> None:
        """Runs a validation or test; its result is in :attr:`results`."""
        self._results = self._attached().run()

    def start_predicting(self, trainer: Trainer) -> None:
        """Runs a prediction; its result is in :attr:`results`."""
        self._results = self._attached().run()

    @property
    def results(self) -> Any:
        """The results of the last run; set before :meth:`teardown`."""
        return self._results

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's step. An override is captured: part of the compiled program."""
        return self.lightning_module.training_step(*args, **kwargs)

    def post_training_step(self) -> None:
        """Called after every training step, on the host."""

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``validation_step``, see :meth:`training_step`."""
        return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``test_step``, see :meth:`training_step`."""
        return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``predict_step``, see :meth:`training_step`."""
        return self.lightning_module.predict_step(*args, **kwargs)

    def training_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside what is differentiated."""
        return output

    def validation_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside the program."""
        return output

    def test_step_end(self, output: Any) -> Any:
        """Called at the end of the step, inside the program."""
        return output

    # -- optimization ----------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called before each backward's hooks, on the host, with the real loss."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called after each backward's hooks, on the host; gradients can be read and changed."""

    def optimizer_step(self, optimizer: Optimizer, lambda_closure: Callable[[], Any], **kwargs: Any) -> None:
        """Step the optimizer: the closure runs forward and backward, then the update."""
        self._attached().make_update(optimizer, lambda_closure, **kwargs)

    def pre_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int, **kwargs: Any) -> None:
        """Called before each real optimizer step, on the host. (1.3)"""

    def post_optimizer_step(self, optimizer: Optimizer, optimizer_idx: int, **kwargs: Any) -> None:
        """Called after each real optimizer step, on the host."""

    def update_global_step(self, total_batch_idx: int, current_global_step: int) -> int:
        """``global_step`` after an optimizer step; must be the same on every process."""
        return current_global_step + 1

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, with what is on the mesh."""
        return self._attached().state_of(optimizer)

    # -- data ------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """The loader after re-batching; what this returns is iterated."""
        return dataloader

    def on_reset_train_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """Called once per (re)load of each loader, after re-batching; the result replaces the loader."""
        return dataloader

    def on_reset_val_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """Replace the validation loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    def on_reset_test_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """Replace the test loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    def on_reset_predict_dataloader(self, dataloader: Iterable[Any] | DataLoader) -> Iterable[Any] | DataLoader:
        """Replace the predict loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    # -- collectives and checkpoints -------------------------------------------------------------------------------

    def reduce_boolean_decision(self, decision: bool) -> bool:
        """Reduce a decision: True if every process says True."""
        return self._attached().reduce_boolean(decision) if self._strategy is not None else decision

    def lightning_module_state_dict(self) -> dict[str, Any | Tensor]:
        """The model's state: global shapes, sharded until somebody reads."""
        return self.lightning_module.state_dict(keep_vars=True)

    def on_save(self, checkpoint: dict[str, Any | Tensor]) -> dict[str, Any | Tensor]:
        """The checkpoint dict before it is written."""
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str) -> None:
        """Writes the checkpoint; every process its shards; returns when committed."""
        self._attached().write(self.on_save(checkpoint), filepath)

    def load_checkpoint_file(self, checkpoint_path: str) -> dict[str, Any]:
        """Reads a checkpoint dict, on every process."""
        return self._attached().read(checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the model the weights of a checkpoint."""
        module = self.lightning_module
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the optimizers the state of a checkpoint, on the mesh."""
        self._attached().restore_optimizers(checkpoint)

    @property
    def should_rank_save_checkpoint(self) -> bool:
        """Whether this process writes small host files, links and deletions; never gates the collective write."""
        return self.is_global_zero

    @classmethod
    def register_plugins(cls, plugin_registry: StrategyRegistryType) -> None:
        """Registers the names of the class."""

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Called before anything happens for the batch."""

    def _attached(self) -> Any:
        """The strategy through which the plugin reaches the mesh.

        Raises:
            RuntimeError: no Trainer has taken the plugin yet.
        """
        if self._strategy is None:
            raise RuntimeError(f"{type(self).__name__} is used before a Trainer took it: pass it as Trainer(plugins=[…])")
        return self._strategy
