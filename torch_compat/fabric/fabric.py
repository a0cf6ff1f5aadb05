"""Fabric: a training loop in the user's hands, on the mesh. API: ``lightning.fabric.Fabric`` 2.6."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from torch_compat.fabric.checkpoints import Checkpoints
from torch_compat.fabric.compiled_function import CompiledFunction
from torch_compat.fabric.connector import _is_using_cli, from_command_line
from torch_compat.fabric.model import MeshModel
from torch_compat.fabric.reports import Reports
from torch_compat.fabric.resolve import resolve
from torch_compat.fabric.strategies import SingleDeviceStrategy
from torch_compat.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer, is_wrapped, unwrap
from torch_compat.trainer.data.dataloaders import prepare_dataloader
from torch_compat.utilities.data import _auto_add_worker_init_fn
from torch_compat.utilities.rank_zero import rank_zero_deprecation, rank_zero_warn
from torch_compat.utilities.seed import seed_everything
from torch_compat.utilities.warnings import PossibleUserWarning
from torch_compat.utilities.wide_types import keep_wide_types

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def _do_nothing(*_: Any) -> None:
    """The function that ``launch()`` runs if it is given none."""


class Fabric(Reports, Checkpoints):
    """Puts a loop of the user's own on a mesh of devices.

    A call of a set-up module runs as a program on the mesh, with the global batch: its backward pass is another one, optimizers
    step on the mesh, and what lies between (the loss) is plain torch on this process's rows. :meth:`compile` makes one
    program of a whole step, which is much faster.

    ::

        fabric = Fabric(accelerator="cpu", devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))

        @fabric.compile
        def step(batch):
            loss = model(batch).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for batch in fabric.setup_dataloaders(loader):
            loss = step(batch)

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"tpu"``, or an ``Accelerator``.
        strategy: ``"auto"``, ``"ddp"``, ``"fsdp"``, ``"mesh"``, or a ``Strategy`` of ``lightning.fabric.strategies``.
        devices: devices of each process: a number, a list of indices, or ``"auto"``.
        num_nodes: processes, one on each host.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"bf16-true"``, ``"int8-mixed"``, ``"64-true"``, ….
        plugins: a ``Precision``, ``CheckpointIO`` or ``ClusterEnvironment``, or a list of them.
        callbacks: objects whose methods :meth:`call` calls.
        loggers: where :meth:`log` goes.

    Raises:
        MisconfigurationException: flags that contradict each other, or that are not offered on a mesh.
        ValueError: ``fabric run`` says otherwise.
    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: list[Any] | Any | None = None,
        loggers: Any = None,
    ) -> None:
        super().__init__(callbacks, loggers)
        accelerator = from_command_line("accelerator", accelerator, "auto")
        strategy = from_command_line("strategy", strategy, "auto")
        devices = from_command_line("devices", devices, "auto")
        num_nodes = from_command_line("num_nodes", num_nodes, 1)
        precision = from_command_line("precision", precision, None)
        self._strategy, mesh = resolve(
            accelerator, strategy, devices, int(num_nodes) if isinstance(num_nodes, str) else num_nodes, precision, plugins
        )
        keep_wide_types(self, self._strategy.precision.needs_x64)
        self._mesh = mesh
        self._model = MeshModel(mesh, self._strategy.precision)
        self._strategy.take_mesh(mesh, self._model)
        self._models_setup = 0
        self._launched = False
        if type(self).run is not Fabric.run:
            if _is_using_cli():
                raise TypeError(
                    "Overriding `Fabric.run()` and launching from the CLI is not allowed: run the script with "
                    "`python -m torch_compat`, or call `fabric.setup(…)` and the rest where the object is made"
                )
            self.run = functools.partial(self._launch_and_run, self.run)
        if _is_using_cli():
            self._setup_environment()

    def __deepcopy__(self, memo: dict[int, Any]) -> Fabric:
        """This object itself: a copy of a module that knows it is on the same mesh."""
        return self

    # -- launching -------------------------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The method that a subclass overrides; a call launches first."""

    def launch(self, function: Callable[..., Any] = _do_nothing, *args: Any, **kwargs: Any) -> Any:
        """Sets the hardware up. Nothing is started: several processes are started from outside (``xlatrain launch``).

        Args:
            function: called with this object, ``args`` and ``kwargs``.

        Returns:
            What it returns.

        Raises:
            TypeError: something that cannot be called so.
            RuntimeError: ``fabric run`` started the script, which sets the hardware up when a Fabric is made.
        """
        if _is_using_cli():
            raise RuntimeError(
                "This script was launched through the CLI, and processes have already been created: take the call of `.launch()` "
                "out, or run the script with `python -m torch_compat`"
            )
        if function is _do_nothing:
            self._setup_environment()
            return None
        if not callable(function):
            raise TypeError(
                f"`Fabric.launch(...)` needs to be a callable, but got {function}: pass the function, as in "
                "`fabric.launch(main)`, not its result"
            )
        if not inspect.signature(function).parameters:
            raise TypeError(
                f"`Fabric.launch(function={function})` needs to take at least one argument: it is called with this "
                "`Fabric` object."
            )
        self._setup_environment()
        return function(self, *args, **kwargs)

    def _launch_and_run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._setup_environment()
        return run(*args, **kwargs)

    def _setup_environment(self) -> None:
        self._strategy.setup_environment()
        self._launched = True

    # -- setting up ------------------------------------------------------------------------------------------------

    def setup(
        self,
        module: Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Sets up a module and its optimizers.

        Args:
            module: placed on the mesh when it is first used.
            *optimizers: of its parameters; their state is split like these.
            scheduler: given back as it is.
            move_to_device: whether the strategy's ``module_to_device`` is called.

        Returns:
            The module, and the optimizers and the scheduler if there are any, to be used instead.

        Raises:
            RuntimeError: :meth:`launch` was not called.
            ValueError: something was set up before.
        """
        self._check_launched()
        _check_new(
            (module,), _FabricModule, "A model should be passed only once to the `setup` method: use what the first call returned"
        )
        _check_new(
            optimizers,
            _FabricOptimizer,
            "An optimizer should be passed only once to the `setup` method: use what the first call returned",
        )
        ready, plain = self._prepare(module, optimizers, move_to_device)
        wrapped = [self._wrap_optimizer(optimizer) for optimizer in plain]
        self._adopt(unwrap(module), wrapped)
        self.call("on_after_setup", fabric=self, module=ready)
        if not wrapped and scheduler is None:
            return ready
        return (ready, *wrapped) if scheduler is None else (ready, *wrapped, scheduler)

    def setup_module(self, module: Module, move_to_device: bool = True, _reapply_compile: bool = True) -> _FabricModule:
        """Sets up a module alone; its optimizers follow with :meth:`setup_optimizers`. See :meth:`setup`."""
        self._check_launched()
        _check_new(
            (module,),
            _FabricModule,
            "A model should be passed only once to the `setup_module` method: use what the first call returned",
        )
        ready, _ = self._prepare(module, (), move_to_device)
        self._adopt(unwrap(module), [])
        return ready

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Sets up optimizers of modules that were set up before; a tuple for several.

        Raises:
            ValueError: none, or one that was set up before.
        """
        self._check_launched()
        if not optimizers:
            raise ValueError("`setup_optimizers` requires at least one optimizer as input.")
        _check_new(
            optimizers,
            _FabricOptimizer,
            "An optimizer should be passed only once to the `setup_optimizers` method: use what the first call returned",
        )
        wrapped = tuple(self._wrap_optimizer(self._strategy.setup_optimizer(optimizer)) for optimizer in optimizers)
        return wrapped[0] if len(wrapped) == 1 else wrapped

    def _prepare(
        self, module: Module, optimizers: Sequence[Optimizer], move_to_device: bool
    ) -> tuple[_FabricModule, list[Optimizer]]:
        original = unwrap(module)  # a torch.compiled module without its compiler: XLA compiles here
        converted = self._strategy.precision.convert_module(original)
        if move_to_device:
            self._strategy.module_to_device(converted)
        self._model.add_module(converted)
        if optimizers:
            forward, optimizers = self._strategy.setup_module_and_optimizers(converted, list(optimizers))
        else:
            forward = self._strategy.setup_module(converted)
        self._models_setup += 1
        return _FabricModule(forward, self._strategy, original_module=original), list(optimizers)

    def _wrap_optimizer(self, optimizer: Optimizer) -> _FabricOptimizer:
        self._model.add_optimizer(optimizer)
        return _FabricOptimizer(optimizer, self._strategy, self._callbacks)

    def _adopt(self, module: Module, optimizers: list[Any]) -> None:
        """A LightningModule knows its Fabric, and is one of its callbacks."""
        if not hasattr(module, "_fabric"):
            return
        module._fabric = self  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        module._fabric_optimizers = optimizers  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        if not any(one is module for one in self._callbacks):
            self._callbacks.append(module)

    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Loaders whose batches are this process's rows of the global batch: ``batch_size`` × the devices that split it.

        ::

            for batch in fabric.setup_dataloaders(loader):
                model(batch)

        Args:
            *dataloaders: the user's; their samplers define one global order.
            use_distributed_sampler: False leaves the batches as they are: each is one process's batch.
            move_to_device: whether tensors are moved to :attr:`device`.

        Returns:
            A loader, or a list of them.

        Raises:
            ValueError: none, or one that was set up before.
            TypeError: something that is no ``DataLoader``.
        """
        self._check_launched()
        if not dataloaders:
            raise ValueError("`setup_dataloaders` requires at least one dataloader as input.")
        _check_new(
            dataloaders,
            _FabricDataLoader,
            "A dataloader should be passed only once to the `setup_dataloaders` method: use what the first call returned",
        )
        if any(not isinstance(one, DataLoader) for one in dataloaders):
            raise TypeError(
                "Only PyTorch DataLoader are currently supported in `setup_dataloaders`; iterate over others as they are"
            )
        ready = [self._prepare_dataloader(one, use_distributed_sampler, move_to_device) for one in dataloaders]
        return ready[0] if len(ready) == 1 else ready

    def _prepare_dataloader(self, loader: Any, use_distributed_sampler: bool, move_to_device: bool) -> _FabricDataLoader:
        mesh = self._mesh
        prepared = prepare_dataloader(
            loader,
            mesh.data_parallel_size,
            use_distributed_sampler=use_distributed_sampler,
            layout=mesh.layout,
            world_size=mesh.world_size,
        )
        _auto_add_worker_init_fn(prepared, self.global_rank)
        prepared = self._strategy.process_dataloader(prepared)
        return _FabricDataLoader(prepared, self.device if move_to_device else None, self._model.whole)

    # -- steps -----------------------------------------------------------------------------------------------------

    @overload
    def compile(self, function: F) -> F: ...

    @overload
    def compile(self) -> Callable[[F], F]: ...

    def compile(self, function: Any = None) -> Any:
        """Compile a whole step.

        ::

            @fabric.compile
            def step(batch):
                loss = model(batch).pow(2).mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                return loss

            print(step(batch))

        The function's Python runs once for each variant (shapes, flags, plain values that it reaches); it computes the same as
        without. Arguments with tensors are the batch, numbers are inputs of the program. Where the function cannot be captured,
        it runs uncompiled, after a warning that names the line; ``XLATRAIN_EXECUTOR=compiled`` makes that an error. Stock
        Lightning has no such method.

        Args:
            function: the step; None: a decorator.

        Returns:
            A function of the same signature, which returns tensors that are read when something needs their values.
        """
        return functools.partial(CompiledFunction, self) if function is None else CompiledFunction(self, function)

    def backward(self, tensor: Tensor, *args: Any, model: _FabricModule | None = None, **kwargs: Any) -> None:
        """Gradients of ``tensor``, added to ``p.grad``: those of the global batch, where ``tensor`` is a mean over rows.

        ::

            loss = model(batch).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        Args:
            tensor: the loss.
            model: which set-up module it belongs to, for strategies that ask.
        """
        module = None if model is None else unwrap(model)
        self._strategy.backward(tensor, module, *args, **kwargs)

    def clip_gradients(
        self,
        module: Module | _FabricModule,
        optimizer: Optimizer | _FabricOptimizer,
        clip_val: float | int | None = None,
        max_norm: float | int | None = None,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clips the gradients of ``optimizer`` to a value, or to a norm; gives the norm before.

        ::

            fabric.backward(model(batch).pow(2).mean())
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()

        In a compiled step an infinite norm raises after the step.

        Raises:
            ValueError: neither or both of ``clip_val`` and ``max_norm``.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        if clip_val is not None and max_norm is not None:
            raise ValueError("Only one of `clip_val` or `max_norm` can be set: the first cuts values, the second the norm")
        plain, own = unwrap(module), unwrap(optimizer)
        if clip_val is not None:
            self._strategy.clip_gradients_value(plain, own, clip_val=clip_val)
            return None
        if max_norm is None:
            raise ValueError(
                "You have to specify either `clip_val` or `max_norm` to do gradient clipping: the first cuts values, "
                "the second the norm"
            )
        return self._strategy.clip_gradients_norm(
            plain, own, max_norm=max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def check_replicas(self, where: str = "in a loop of Fabric's") -> None:
        """Compare bit by bit what data-parallel devices hold of modules and optimizers (silent data corruption); all processes
        call it, every so many steps and before :meth:`save`. What is split over all devices has no replica and is not compared.

        Args:
            where: in the loop, for the error: ``f"at step {step}"``.

        Raises:
            SilentDataCorruptionError: names the devices, their hosts and the arrays.
            MisconfigurationException: there are no several devices, or nothing has run on them yet.
        """
        self._model.check_replicas(where)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision's forward context, for computations outside of a module."""
        return self._strategy.precision.forward_context()

    def no_backward_sync(self, module: _FabricModule, enabled: bool = True) -> AbstractContextManager[None]:
        """The context in which a strategy of the user's skips the exchange of gradients. On a mesh there is nothing to skip.

        Gradients are global when they are computed.

        Raises:
            TypeError: a module that was not set up.
        """
        if not isinstance(unwrap(module), Module) or not is_wrapped(module):
            raise TypeError(
                "You need to set up the model first before you can call `fabric.no_backward_sync()`, "
                "as in `model = fabric.setup(model)`"
            )
        control = self._strategy._backward_sync_control
        if control is not None:
            return control.no_backward_sync(module._forward_module, enabled)
        if not isinstance(self._strategy, SingleDeviceStrategy):
            rank_zero_warn(
                f"The `{type(self._strategy).__name__}` does not support skipping the gradient synchronization. Remove "
                "`.no_backward_sync()`, or give the strategy a `_backward_sync_control`.",
                category=PossibleUserWarning,
            )
        return contextlib.nullcontext()

    # -- creation --------------------------------------------------------------------------------------------------

    def init_tensor(self) -> AbstractContextManager[Any]:
        """The context of the creation of tensors: the precision's dtype."""
        return self._strategy.tensor_init_context()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """The context of the creation of a module: its parameters get their values on their shards, in the precision's dtype.

        Args:
            empty_init: leave out initialisation, for a checkpoint that is loaded next.
        """
        self._check_launched()
        return self._strategy.module_init_context(empty_init=empty_init)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """:meth:`init_module` under the name of earlier versions."""
        rank_zero_deprecation("`Fabric.sharded_model()` is deprecated in favor of `Fabric.init_module()`.")
        self._check_launched()
        return self._strategy.module_sharded_context()

    def to_device(self, obj: Any) -> Any:
        """A module, a tensor or a collection of tensors on :attr:`device`."""
        if isinstance(obj, Module):
            self._strategy.module_to_device(obj)
            return obj
        return self._strategy.batch_to_device(obj)

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seeds Python, numpy and torch, and the loaders' workers unless ``workers`` is False. Gives the seed."""
        return seed_everything(seed=seed, workers=True if workers is None else workers, verbose=verbose)


def _check_new(things: Sequence[Any], wrapper: type, message: str) -> None:
    if any(isinstance(thing, wrapper) for thing in things):
        raise ValueError(message)
