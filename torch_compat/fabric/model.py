"""The modules and optimizers of one Fabric, on its mesh."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from torch_compat.fabric.steps import FabricSteps
from torch_compat.run import report
from torch_compat.run.report import ExecutorLog
from torch_compat.step.device_memory import advice
from torch_compat.step.eager.fallback import executor_choice, of_one_memory, share_values, with_gradients
from torch_compat.step.eager.once_more import once_more, raised
from torch_compat.step.eager.whole_batch import WholeBatches
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.guards.taking import given_again
from torch_compat.step.kept_graphs import graphs_of
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.forms import functional_form
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.placed_optimizers import PlacedOptimizers
from torch_compat.step.placed_run import PlacedRun, captured_by
from torch_compat.step.update.offload import captured_as_a_whole
from torch_compat.strategies.sharding_report import report_shardings
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_collectives import replicated_eager
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.errors import BridgeError
from xlatrain.mesh.mesh import in_words
from xlatrain.step.device_memory import explained_shortage
from xlatrain.step.replicas import ReplicaCheck

_T = TypeVar("_T")

if TYPE_CHECKING:
    from torch_compat.plugins.precision import Precision
    from torch_compat.step.host.scalars import ScalarTracer
    from torch_compat.strategies.strategy import Strategy as MeshStrategy


class MeshModel:
    """The modules and optimizers that were set up, placed on the mesh when they are first used.

    Args:
        strategy: of the mesh.
        precision: decides the dtypes.

    Attributes:
        on_host: whether modules run in plain torch on this process's CPU.
        whole: puts whole batches together where modules run so on several processes; else None.
        recorder, tracer: while a step is captured, where its host calls go and where its numbers come from.
    """

    def __init__(self, strategy: MeshStrategy, precision: Precision) -> None:
        self.on_host = executor_choice() == "eager"
        self.recorder: LogRecorder | None = None
        self.tracer: ScalarTracer | None = None
        self._strategy = strategy
        self._precision = precision
        self._modules: list[weakref.ref[Module]] = []  # what is on the mesh is held by its state
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._run: PlacedRun[FabricSteps] | None = None
        self._indices: MutableMapping[Optimizer, int] = WeakIdKeyDictionary()
        self._unsupported: MutableMapping[Optimizer, str] = WeakIdKeyDictionary()
        self._entry: dict[str, Any] | None = None
        self._replicas: ReplicaCheck | None = None
        self.whole: WholeBatches | None = None
        if self.on_host and strategy.layout.processes > 1:
            self._be_one_world()

    def _be_one_world(self) -> None:
        """Every process computes with the rows of all, as eager steps of the Trainer do, for as long as this object is there."""
        self.whole = WholeBatches(self._strategy.layout)
        world = contextlib.ExitStack()
        world.enter_context(replicated_eager())
        weakref.finalize(self, world.close)

    # -- what was set up -------------------------------------------------------------------------------------------

    def add_module(self, module: Module) -> None:
        """Take up a module that was set up, for as long as somebody has it; those that nobody has any more are let go."""
        if not any(module is one for one in _alive(self._modules)):
            self.release()
            self._modules = [*map(weakref.ref, _alive(self._modules)), weakref.ref(module)]
            reason = None if self.on_host else of_one_memory(_Modules(_alive(self._modules)).named_parameters())
            if reason is not None:
                self.run_on_host(reason)
            if self.whole is not None:
                share_values(self._strategy, module, "XLATRAIN_EXECUTOR=eager")
            if self.on_host and self._entry is None:  # eager from the beginning
                log = ExecutorLog(fallback=reason or "XLATRAIN_EXECUTOR=eager")
                self._entry = log.run("fabric", "eager", self._strategy.mesh, self._precision.precision)
                report.add_run(self._entry)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Take up an optimizer that was set up, for as long as somebody has it."""
        if not any(optimizer is one for one in _alive(self._optimizers)):
            self.release()
            self._optimizers = [*map(weakref.ref, _alive(self._optimizers)), weakref.ref(optimizer)]

    def knows(self, thing: Module | Optimizer) -> bool:
        """Whether a module (or a part of one) or an optimizer was set up."""
        if isinstance(thing, Optimizer):
            return any(thing is one for one in _alive(self._optimizers))
        return any(thing is child for one in _alive(self._modules) for child in one.modules())

    # -- on the mesh -----------------------------------------------------------------------------------------------

    @property
    def steps(self) -> FabricSteps:
        """The runner of the modules and optimizers that were set up; placed on the mesh at the first access."""
        return self.run.steps

    @property
    def run(self) -> PlacedRun[FabricSteps]:
        """The modules and optimizers on the mesh, where they are put at the first access."""
        return self._place() if self._run is None else self._run

    @property
    def placed(self) -> ModelState | None:
        """The arrays, if anything is on the mesh."""
        return None if self._run is None else self._run.model

    @property
    def optimizer_set(self) -> OptimizerSet:
        """The optimizers in pure form; they are on the mesh."""
        functional = None if self.run.optimizers is None else self.run.optimizers.functional
        assert isinstance(functional, OptimizerSet)
        return functional

    def check_replicas(self, where: str) -> None:
        """Compare what devices hold of parameters, buffers and optimizer state; see :meth:`Fabric.check_replicas`."""
        placed, mesh = self.placed, self._strategy.mesh
        if placed is None or mesh.devices.size == 1:
            what = f"the mesh has {in_words(mesh)}" if mesh.devices.size == 1 else "nothing has run on the mesh yet"
            raise MisconfigurationException(
                f"check_replicas compares the replicas of several devices, and {what}: leave it out here"
            )
        if self._replicas is None:
            self._replicas = ReplicaCheck(mesh)
        self._replicas.check(placed.state, where)

    def explained_shortage(self) -> contextlib.AbstractContextManager[None]:
        """Explain a shortage of device memory in the block: the error says what takes the memory, and what to change."""
        return explained_shortage(
            lambda: None if self.placed is None else self.placed.raw_state,
            lambda: advice(self._strategy, self._precision.precision, of_fabric=True),
        )

    def _place(self) -> PlacedRun[FabricSteps]:
        modules = _alive(self._modules)
        if not modules:
            raise RuntimeError("no module was set up: call fabric.setup(module, optimizer) first")
        root = modules[0] if len(modules) == 1 else _Modules(modules)
        grads = {name: param.grad for name, param in root.named_parameters() if param.grad is not None}
        strategy = self._strategy
        self._run = run = PlacedRun(
            strategy,
            root,
            functools.partial(FabricSteps, shortage=self.explained_shortage),
            roots={"self": root},
            logging=functools.partial(captured_by, self),
            forward=contextlib.nullcontext,  # the precision's is around each call of a module
            compiling=self._tell_compiling,
            graphs=graphs_of(modules[0]).begin_run(),  # of whatever was set up beside it: their tensors are told by their names
        )
        model = run.model
        self._place_optimizers(run)
        report_shardings(strategy, model)
        model.gradients.are_kept = True
        for name, grad in grads.items():
            with torch._C.DisableTorchFunctionSubclass():
                model.params[name].grad = None
            model.params[name].grad = grad
        run.follow()
        self._entry = run.steps.log.run("fabric", "compiled", strategy.mesh, self._precision.precision)
        report.add_run(self._entry)
        return run

    def _place_optimizers(self, run: PlacedRun[FabricSteps]) -> None:
        names, functional = run.names, []
        for optimizer in _alive(self._optimizers):
            try:
                found = functional_form(optimizer, names)
            except UnsupportedOptimizerError as error:
                self._unsupported[optimizer] = str(error)
                continue
            except ValueError as error:  # it steps in plain torch, as a temperature's does in a loop of reinforcement learning
                self._unsupported[optimizer] = (
                    f"{type(optimizer).__name__} has a parameter that belongs to no module that was set up; pass its module to "
                    f"fabric.setup or fabric.setup_module ({error})"
                )
                continue
            self._indices[optimizer] = len(functional)
            functional.append(found)
        if run.model.offloads and (why := captured_as_a_whole(functional)) is not None:
            raise MisconfigurationException(f"{type(self._strategy).__name__}(offload='optimizer'): {why}")
        known = [one.optimizer for one in functional]
        run.place_optimizers(OptimizerSet(functional), known, steps_them=True)

    def index_of(self, optimizer: Optimizer) -> int | None:
        """The index of an optimizer in :attr:`optimizer_set`; None for an optimizer that has no pure form."""
        return self._indices.get(optimizer)

    def why_unsupported(self, optimizer: Optimizer) -> str:
        """Why :meth:`index_of` is None."""
        return self._unsupported.get(optimizer, f"{type(optimizer).__name__} was not set up: fabric.setup_optimizers")

    def check_optimizers(self) -> None:
        """Push what user code did to optimizers' state; CaptureError where their next step cannot be compiled any longer."""
        if self._run is not None and self._run.optimizers is not None:
            self._run.optimizers.check()

    def _tell_compiling(self, value: bool) -> None:
        if not value:
            self.update_report()

    def update_report(self) -> None:
        """Bring the run's entry in the report up to date."""
        if self._entry is None or self._run is None or not os.environ.get("XLATRAIN_REPORT"):
            return
        log, mesh = self._run.steps.log, self._strategy.mesh
        self._entry.update(log.run("fabric", "eager" if self.on_host else "compiled", mesh, self._precision.precision))
        report.write()

    # -- the optimizers' state -------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()``, of the state's own tensors; where it is split, of copies that are read when needed."""
        optimizers = self._placed_optimizers(optimizer)
        return optimizer.state_dict() if optimizers is None or optimizers.is_whole else optimizers.state_dict(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """``optimizer.load_state_dict(state)``, onto the mesh."""
        optimizers = self._placed_optimizers(optimizer)
        optimizer.load_state_dict(dict(state)) if optimizers is None else optimizers.load([(optimizer, state)])

    def _placed_optimizers(self, optimizer: Optimizer) -> PlacedOptimizers | None:
        """The optimizers on the mesh, if this one is among them."""
        return None if self._run is None or self.index_of(optimizer) is None else self._run.optimizers

    # -- leaving the mesh ------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Give modules, gradients and optimizers back to the host, if they are on the mesh."""
        if (run := self._run) is None:
            return
        run.stop_following()
        self.update_report()
        run.model.push_writes()
        with_gradients(run.model, run.release)
        self._run = None
        self._indices.clear()
        self._unsupported.clear()

    def run_again(self, error: Exception, run: Callable[[], _T]) -> _T:
        """The outcome of ``run()`` in plain torch, where modules run from now on, since something could not run on the mesh.

        Raises:
            Exception: what ``run`` raises; ``error`` itself, where more than an attempt has failed, or no other way is wanted.
            MisconfigurationException: see :meth:`run_on_host`.
        """
        if isinstance(error, BridgeError):
            if not error.recoverable:
                raise error
            self.run_on_host(str(error))
            with given_again():
                return run()
        alone = self._strategy.layout.processes == 1 and executor_choice() == "auto"
        if self._run is None or not self._run.steps.took_back(error) or not alone:
            raise error
        self.run_on_host(raised(error))
        with given_again():
            return once_more(error, run)

    def run_on_host(self, reason: str) -> None:
        """Run modules in plain torch from now on.

        Raises:
            MisconfigurationException: only compiled steps are wanted, or several processes run.
        """
        if executor_choice() == "compiled" or self._strategy.layout.processes > 1:
            raise MisconfigurationException(
                f"this cannot be compiled: {reason}\nSet XLATRAIN_EXECUTOR=eager to run in plain torch from the beginning, each "
                "of several processes with the rows of all, or make it compilable"
            )
        rank_zero_warn(f"Modules run in plain torch on one CPU, not on the mesh. {reason}")
        if self._run is not None:
            self._run.steps.log.fallback = reason
        self.on_host = True
        self.release()


class _Modules(Module):
    """The modules of a Fabric as one, each under the name of its class."""

    def __init__(self, modules: list[Module]) -> None:
        super().__init__()
        for module in modules:
            name, number = type(module).__name__, 1
            while name in self._modules:
                number += 1
                name = f"{type(module).__name__}{number}"
            self._modules[name] = module


def _alive(held: list[weakref.ref[_T]]) -> list[_T]:
    return [one for reference in held if (one := reference()) is not None]
