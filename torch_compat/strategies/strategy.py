"""Strategies: which mesh a run uses, how parameters lie on it, and the documented seam between the loops and a plugin.

API: ``lightning.pytorch.strategies.Strategy`` 2.6. A strategy is given to ``Trainer(strategy=…)`` by name or as an object. The
loops call what a subclass overrides, at the documented moment; what nobody overrides costs nothing
(``docs/compat/strategy_2.md``).
"""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import torch
from jax.sharding import Mesh
from torch import Tensor
from torch.optim import Optimizer

from torch_compat.core.optimizer import LightningOptimizer
from torch_compat.plugins.io.checkpoint_io import CheckpointIO
from torch_compat.plugins.layer_sync import LayerSync
from torch_compat.plugins.precision import Precision
from torch_compat.step.materialize import put_away
from torch_compat.step.mesh_run import MeshRun
from torch_compat.step.model_state import ModelState
from torch_compat.strategies.checkpoints import StrategyCheckpoints
from torch_compat.strategies.hardware import HardwareOfStrategy
from torch_compat.strategies.hooks import StrategyHooks
from torch_compat.strategies.not_offered import NamesWhatIsNotOffered
from torch_compat.strategies.sharding_report import report_shardings
from torch_compat.strategies.steps import StrategySteps
from torch_compat.utilities.device_transfer import move_data_to_device
from torch_compat.utilities.overrides import overrides
from torch_compat.utilities.parts import of
from torch_compat.utilities.rank_zero import rank_zero_only
from xlatrain.bridge.capture.activations import split_activations
from xlatrain.bridge.capture.offloading import offloaded
from xlatrain.bridge.capture.rematerialization import checkpointed_modules, rematerialized
from xlatrain.bridge.capture.traceable.transformers_experts import routed_experts
from xlatrain.bridge.lazy_init import SkippedInitializers, deferred_init, draw_seed
from xlatrain.bridge.pretrained import load_pretrained
from xlatrain.init.pretrained import NameMapping
from xlatrain.mesh.data import BatchLayout
from xlatrain.mesh.mesh import data_parallel_size, in_words, make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.offload import check_host_memory

if TYPE_CHECKING:
    from torch_compat.accelerators.accelerator import Accelerator
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

TBroadcast = TypeVar("TBroadcast")
TReduce = TypeVar("TReduce")


class Strategy(HardwareOfStrategy, StrategySteps, StrategyHooks, StrategyCheckpoints, NamesWhatIsNotOffered):
    """A device mesh and what runs on it. Subclass :class:`DDPStrategy` or :class:`FSDPStrategy` rather than this: they have the
    abstract members.

    Args:
        accelerator: the hardware; None: the Trainer's.
        checkpoint_io: how checkpoints reach storage; None: sharded directories.
        precision_plugin: dtypes; None: the Trainer's ``precision``.

    Attributes:
        strategy_name: the name that ``Trainer(strategy=…)`` takes.
        rules: how parameters are split over the mesh; :meth:`sharding_rules` adds what depends on the module.
        remat: globs over module paths: what these modules compute is computed again in the backward pass, not kept.
        offload_activations: globs over module paths: what these modules save for the backward pass is in host memory until then.
        show_shardings: print what lies where when a run begins; a path that ends in ``.svg`` or ``.json``: write it there.
        no_recompilation_after: training batches of a run after which compiling a step again is an error; None: never. The
            environment variable ``XLATRAIN_NO_RECOMPILATION_AFTER`` comes first.
    """

    strategy_name = ""
    remat: tuple[str, ...] = ()
    offload_activations: tuple[str, ...] = ()
    show_shardings: bool | str | os.PathLike[str] = False
    no_recompilation_after: int | None = None

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(checkpoint_io)
        self.rules = ShardingRules()
        self.layer_sync: LayerSync | None = None
        self._accelerator = accelerator
        self._precision_plugin = precision_plugin
        self._mesh_run = MeshRun()

    # -- plugins ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """Decides the dtypes."""
        return self._precision_plugin if self._precision_plugin is not None else _FULL_PRECISION

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = precision_plugin

    def overrides(self, name: str) -> bool:
        """Whether a member is the user's own, so that the loops must call it."""
        return overrides(self, name)

    def captured_owners(self) -> dict[str, Any]:
        """Name → plugin object whose own Python may run inside of a captured step: its side effects are followed."""
        owners = {"trainer.strategy": self, "trainer.precision_plugin": self.precision_plugin}
        return {name: owner for name, owner in owners.items() if not type(owner).__module__.startswith("torch_compat.")}

    # -- the mesh --------------------------------------------------------------------------------------------------

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        """Axis name → size for this many devices; by default all in one ``data`` axis."""
        return {"data": n_devices}

    def take_devices(self, devices: Sequence[Any]) -> None:
        """The JAX devices of all processes that the Trainer's flags came to."""
        self._mesh_run.devices = devices
        self._mesh_run.mesh = None
        if jax.process_count() > 1:  # one alone is what its launcher's variables said when Lightning was imported
            rank_zero_only.rank = jax.process_index()  # loggers, messages and bars are process 0's

    @property
    def has_devices(self) -> bool:
        """Whether a Trainer has taken the strategy, so that there is a mesh."""
        return bool(self._mesh_run.devices)

    def __repr__(self) -> str:
        mesh = self._mesh_run.mesh
        return f"<{type(self).__name__}: {'no mesh yet' if mesh is None else in_words(mesh)}>"

    @property
    def mesh(self) -> Mesh:
        """The device mesh; built on first use.

        Raises:
            RuntimeError: no Trainer has taken the strategy yet.
        """
        if self._mesh_run.mesh is None:
            devices = self._mesh_run.devices
            if not devices:
                raise RuntimeError(f"{type(self).__name__} has no mesh yet: it is made when a Trainer takes the strategy")
            axes = self.mesh_axes(len(devices), len({device.process_index for device in devices}))
            everything = list(devices) == jax.devices()
            self._mesh_run.mesh = make_mesh(axes, None if everything else devices)
        return self._mesh_run.mesh

    placed: ModelState | None = of("_mesh_run.placed", "The arrays of the module that is being run.", settable=True)
    world_size: int = of("mesh.devices.size", "Devices in the mesh.")

    @property
    def global_rank(self) -> int:
        """Mesh index of this process's first device."""
        mine = jax.process_index()
        return next((i for i, device in enumerate(self.mesh.devices.flat) if device.process_index == mine), 0)

    @property
    def node_rank(self) -> int:
        """The index of this process."""
        return jax.process_index()

    @property
    def data_parallel_size(self) -> int:
        """The number of parts into which the mesh splits a batch."""
        return data_parallel_size(self.mesh)

    @property
    def layout(self) -> BatchLayout:
        """The layout of a batch's rows over processes."""
        return BatchLayout.from_mesh(self.mesh)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Documented for samplers that users make themselves: they are re-expanded to the global stream."""
        return {"num_replicas": self.data_parallel_size, "rank": self.layout.local[0]}

    # -- set-up and end of a run -----------------------------------------------------------------------------------

    def connect(self, model: LightningModule) -> None:
        """Takes the module of a run; nothing is placed."""
        self._mesh_run.module = model
        self.model = model

    def setup_environment(self) -> None:
        """Called at the beginning of each run, before the user's ``setup`` hook: builds the mesh and sets up the hardware."""
        _ = self.mesh  # made now: what is wrong with its axes is said before a hook of the user's runs
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        """Called after the ``setup`` and ``configure_model`` hooks: parameters go to the mesh, optimizers are created."""
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if self.placed is not None:
            report_shardings(self, self.placed)

    @abstractmethod
    def model_to_device(self) -> None:
        """Puts parameters and buffers where the rules say; they keep their identity."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Calls ``configure_optimizers``; the state is made sharded like the parameters.

        A hook may call it during a fit: the new optimizers and schedulers take the place of those that are there.
        """
        if self._mesh_run.executor is not None:
            self._mesh_run.executor.setup_optimizers()

    def setup_precision_plugin(self) -> None:
        """Connects the precision plugin with model and optimizers."""
        assert self.model is not None
        self.model, self.optimizers, _ = self.precision_plugin.connect(self.model, self.optimizers, [])

    def pre_dispatch(self, trainer: Trainer) -> None:
        """Called after ``on_fit_start``, before a checkpoint's training state is restored. (Eras 1.3 to 1.5.)"""

    def run_stage(self, trainer: Trainer, stage: Callable[[], Any]) -> Any:
        """The run itself, between set-up and tear-down. Strategies of eras 1.3 to 1.5 put their dispatch hooks around it."""
        return stage()

    def teardown(self) -> None:
        """Called at the end of a run: waits for saves, lets go of the module's arrays."""
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._mesh_run.forget()

    # -- how the module is run -------------------------------------------------------------------------------------

    def sharding_rules(self, module: torch.nn.Module) -> ShardingRules:
        """The rules by which the parameters of ``module`` are split."""
        return self.rules

    @contextlib.contextmanager
    def capture_context(self, module: torch.nn.Module) -> Generator[None, None, None]:
        """The context of the capture of a step: :attr:`remat` and :attr:`offload_activations` take effect.

        The modules of the first recompute, those of the second save in host memory; activations stay split as batches are.

        Raises:
            ValueError: a glob of them that matches no module; devices that reach no host memory.
        """
        shardings = {} if self.placed is None else self.placed.param_shardings
        recomputed = self.recomputed_modules(module)
        saving = list(checkpointed_modules(module, self.offload_activations, "offload_activations").values())
        if saving:
            check_host_memory(self.mesh, "offload_activations")
        with (
            rematerialized(recomputed),
            offloaded(saving),
            split_activations(self.mesh, module, shardings),
            routed_experts(self.mesh),
        ):
            yield

    def recomputed_modules(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """The modules below ``module`` whose activations are computed again in the backward pass."""
        return list(checkpointed_modules(module, self.remat).values())

    # -- module and optimizers -------------------------------------------------------------------------------------

    model: Any = of("_mesh_run.model", "The module, wrapped if a subclass wraps it.", settable=True)
    lightning_module: LightningModule | None = of("_mesh_run.module", "The module of the current run, never wrapped.")

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The Trainer's; empty before a run."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return [] if trainer is None else trainer.lr_scheduler_configs

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""
        return self._mesh_run.optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        known = {id(one._optimizer): one for one in self._lightning_optimizers}
        self._mesh_run.optimizers = optimizers
        self._mesh_run.lightning_optimizers = [
            one if isinstance(one, LightningOptimizer) else known.get(id(one)) or LightningOptimizer(one) for one in optimizers
        ]

    _lightning_optimizers: list[LightningOptimizer] = of(
        "_mesh_run.lightning_optimizers", "The optimizers as user code sees them."
    )

    @property
    def call_configure_sharded_model_hook(self) -> bool:
        """Whether ``configure_sharded_model`` is called: in every run, as in 2.x. Plugins of 1.x have a flag of their own."""
        return True

    @call_configure_sharded_model_hook.setter
    def call_configure_sharded_model_hook(self, mode: bool) -> None:
        """The hook has been called."""

    @contextlib.contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """The context of the creation of modules, e.g. ``configure_model``: parameters get their values on their shards.

        See :func:`xlatrain.bridge.lazy_init.deferred_init`; the seed is process 0's.
        """
        with deferred_init(lambda: self.broadcast(draw_seed()), lambda tensor: put_away(tensor, self.mesh, self.rules)):
            yield

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """The context of the creation of tensors: the precision's default dtype.

        Args:
            empty_init: leave out the functions of ``torch.nn.init``, for a module whose values are loaded next.
        """
        with self.precision_plugin.module_init_context(), SkippedInitializers() if empty_init else contextlib.nullcontext():
            yield

    def load_pretrained(
        self, module: torch.nn.Module, path: str | os.PathLike[str], *, names: NameMapping = None, strict: bool = True
    ) -> None:
        """Load a safetensors checkpoint in Hugging Face's layout, e.g. in ``configure_model``, after the module was made there.

        Each process reads the bytes of its own shards, when the module is placed. Arguments and errors are those of
        :func:`xlatrain.bridge.pretrained.load_pretrained`.
        """
        load_pretrained(module, path, names=names, strict=strict)

    # -- data ------------------------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Pass this process's rows through ``transfer_batch_to_device`` and ``on_after_batch_transfer``; the loop places them.

        Args:
            batch: any nesting of tensors.
            device: None: :attr:`root_device`. Another device means just that.
            dataloader_idx: of the loader it came from.
        """
        device = device or self.root_device
        if self.lightning_module is None:
            return move_data_to_device(batch, device)
        return self.lightning_module._apply_batch_transfer_handler(batch, device, dataloader_idx)

    def process_dataloader(self, dataloader: Any) -> Any:
        """The loader after re-batching, before its batches are placed; what this returns is iterated."""
        return dataloader

    def on_reset_train_dataloader(self, dataloader: Any) -> Any:
        """Called once per (re)load of each training loader, after re-batching; the result replaces it. (Eras 1.4 and 1.5.)"""
        return dataloader

    def on_reset_val_dataloader(self, dataloader: Any) -> Any:
        """Replace the validation loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    def on_reset_test_dataloader(self, dataloader: Any) -> Any:
        """Replace the test loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    def on_reset_predict_dataloader(self, dataloader: Any) -> Any:
        """Replace the predict loader, see :meth:`on_reset_train_dataloader`."""
        return dataloader

    # -- collectives -----------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self, name: str | None = None) -> None:
        """Wait until every process is here."""

    @abstractmethod
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of process ``src``, on every process."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every process, stacked."""

    @abstractmethod
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """``tensor`` reduced over processes."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduce a decision: True if every process (``all``), or any process, says True."""
        return decision

    def reduce_value(self, value: float, reduction: str) -> float:
        """A host number that was logged with ``sync_dist=True``, through :meth:`reduce`."""
        if jax.process_count() == 1 and not self.overrides("reduce"):
            return value
        return float(self.reduce(torch.tensor(value, dtype=torch.float64), reduce_op=reduction))


_FULL_PRECISION = Precision()
