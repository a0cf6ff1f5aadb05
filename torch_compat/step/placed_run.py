"""A module and its optimizers on the mesh, with the runner of their steps: in our Trainer, in Fabric, and in stock's Trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

import torch
from packaging.version import Version

from torch_compat.step.capture.step_capture import TraceContext
from torch_compat.step.effects.logged import LogRecorder
from torch_compat.step.host.scalars import ScalarTracer
from torch_compat.step.kept_graphs import RunGraphs
from torch_compat.step.kept_steps import KeptSteps
from torch_compat.step.mesh_step_runner import MeshStepRunner
from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.traced import TracedOptimizers
from torch_compat.step.placed_optimizers import PlacedOptimizers
from torch_compat.step.recompilation import forbidden_after
from torch_compat.step.run_context import RunContext, StepStrategy
from torch_compat.step.step_services import StepServices, place_model
from torch_compat.utilities.rank_zero import WarningCache, rank_zero_warn
from xlatrain.bridge.errors import WrongPlanError
from xlatrain.supported import COMPILED_TORCH

_once = WarningCache()
Steps = TypeVar("Steps", bound=MeshStepRunner)


class PlacedRun(Generic[Steps]):
    """A module on the mesh of a strategy.

    Args:
        strategy: has the mesh and the rules; its ``capture_context`` surrounds each capture.
        module: its parameters become live views of the mesh.
        runner: of its steps.
        model_state: the kind of the module's arrays.
        beside: see :class:`~torch_compat.step.model_state.ModelState`.
        before: the runner where whose steps ended these go on.
        logging, forward: see :class:`~torch_compat.step.capture.step_capture.TraceContext`.
        roots, compiling, backward, around_backward, graphs, kept: see :class:`~torch_compat.step.step_services.StepServices`.

    Attributes:
        model: the module's arrays.
        steps: the runner.
        traced: the stand-ins for optimizers and schedulers while a step is captured.
        optimizers: those that were placed; None where nothing is optimized.
    """

    def __init__(
        self,
        strategy: StepStrategy,
        module: torch.nn.Module,
        runner: Callable[[ModelState, Any, StepServices], Steps],
        model_state: type[ModelState] = ModelState,
        before: MeshStepRunner | None = None,
        *,
        roots: Mapping[str, Any],
        logging: Callable[[LogRecorder, ScalarTracer], AbstractContextManager[Any]],
        forward: Callable[[], AbstractContextManager[Any]],
        compiling: Callable[[bool], None],
        backward: Callable[[torch.Tensor, Callable[..., None]], Any] | None = None,
        around_backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        graphs: RunGraphs | None = None,
        kept: KeptSteps | None = None,
        beside: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> None:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            with forward(), contextlib.ExitStack() as plan:
                try:
                    plan.enter_context(strategy.capture_context(model.module))
                except ValueError as error:
                    raise WrongPlanError(str(error)) from error
                yield

        self._strategy = strategy
        self.model = model = place_model(strategy, module, model_state, beside)
        self.traced = TracedOptimizers([], [], {}, may_step=False)
        self.optimizers: PlacedOptimizers | None = None
        services = StepServices(
            roots=roots,
            trace=TraceContext(model.live.traced_as, logging, around, lambda *given: self.traced.traced(*given)),
            compiling=compiling,
            backward=backward,
            around_backward=around_backward,
            no_recompilation_after=forbidden_after(strategy.no_recompilation_after),
            graphs=graphs,
            kept=kept,
        )
        self.steps = runner(model, strategy.mesh, services if before is None else replace(services, log=before.log))
        if before is not None:
            self.steps.go_on(before)
        self._following = contextlib.ExitStack()

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Parameter → its name."""
        return {param: name for name, param in self.model.params.items()}

    def follow(self) -> contextlib.ExitStack:
        """Follow what the host assigns to modules, until the stack that is returned is closed; then no host call waits."""
        self._following.enter_context(self.steps.running())
        return self._following

    def stop_following(self) -> None:
        """Close the stack of :meth:`follow`."""
        self._following.close()

    def place_optimizers(
        self,
        functional: FunctionalOptimizer | OptimizerSet | None,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        *,
        steps_them: bool,
    ) -> None:
        """Put the state of optimizers on the mesh.

        Args:
            functional: see :class:`~torch_compat.step.placed_optimizers.PlacedOptimizers`; None: nothing is optimized.
            optimizers, schedulers: which a captured step may ask for numbers.
            steps_them: steps run the optimizers themselves.
        """
        inline = functional.inline if isinstance(functional, OptimizerSet) else {}
        self.traced = TracedOptimizers(optimizers, schedulers, self.names, may_step=steps_them, inline=inline)
        if functional is None:
            self.model.add_optimizer(lambda params: {})
        else:
            self.optimizers = PlacedOptimizers(self.model, functional, optimizers)

    def release(self, *, to_host: bool = True, failed: bool = False, others: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Give the module ordinary host tensors again and the optimizers their state, and forget what is on the mesh.

        Args:
            to_host: it fits there; else it is read from the mesh until another run takes it over.
            failed: the run ended with an error, maybe inside of a step, whose donated arrays are gone.
            others: optimizers that were given states of the run's.
        """
        if self.optimizers is not None:
            self.optimizers.release(to_host=to_host, failed=failed, others=others)
        if lost := self.model.release(to_host=to_host, failed=failed):
            rank_zero_warn(
                f"The step that failed took the values of {len(lost)} parameters and buffers with it ({lost[0]}, …): the "
                "module has the values that the host read last. Load a checkpoint before you go on with it"
            )
        self._strategy.placed = None


class CapturesSteps(Protocol):
    """The owner of a loop, whose members user code reaches while a step is captured.

    Attributes:
        recorder, tracer: while a step is captured, where what it logs goes and where its numbers come from.
    """

    recorder: LogRecorder | None
    tracer: ScalarTracer | None


@contextlib.contextmanager
def captured_by(owner: CapturesSteps, recorder: LogRecorder, tracer: ScalarTracer) -> Iterator[None]:
    """The context of a capture: its owner knows where what is logged goes, and where numbers come from."""
    owner.recorder, owner.tracer = recorder, tracer
    try:
        yield
    finally:
        owner.recorder = owner.tracer = None


def roots_of(run: RunContext) -> dict[str, Any]:
    """The objects of the user's in a run whose attributes steps may read and write."""
    roots: dict[str, Any] = {"self": run.lightning_module}
    roots.update({f"trainer.callbacks[{i}]": callback for i, callback in enumerate(run.callbacks)})
    if run.datamodule is not None:
        roots["trainer.datamodule"] = run.datamodule
    return {**roots, **run.strategy.captured_owners()}


def warn_of_torch() -> None:
    """Warn, once, of a torch with which compiled steps are not tested."""
    if Version(torch.__version__).release < COMPILED_TORCH:
        _once.warn(
            f"compiled steps are tested with torch {'.'.join(map(str, COMPILED_TORCH))} and later; torch "
            f"{torch.__version__} is for strategy='torch_xla', in an environment of its own"
        )
