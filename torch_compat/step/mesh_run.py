"""The internals of a strategy in a run, besides the members that Lightning documents: the seam to its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from torch_compat.core.module import LightningModule
    from torch_compat.core.optimizer import LightningOptimizer
    from torch_compat.step.kept_steps import KeptSteps
    from torch_compat.step.model_state import ModelState


class SetsUpRun(Protocol):
    """The executor of a run's steps, as its strategy reaches it."""

    def start(self) -> None:
        """Put the module on the mesh, or decide that steps run eagerly; once in a run."""

    def setup_optimizers(self) -> None:
        """Call ``configure_optimizers``, and compile the update."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``state_dict()`` of an optimizer with what is on the mesh."""
        ...

    def load_optimizer_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizers such states."""


class MeshRun:
    """Internals of one strategy; without ``__dict__``, so that a captured step does not follow them as user state.

    Attributes:
        devices: JAX devices of all processes, set when a Trainer takes the strategy.
        mesh: built over them.
        module: the LightningModule of the run.
        model: what :attr:`Strategy.model` was set to.
        optimizers, lightning_optimizers: of the run, plain and wrapped.
        device: where user code puts tensors; a GPU while steps run eagerly on it.
        placed: the module's arrays, while a run is on.
        executor: of the steps, while a run is on.
        kept: the steps of its last run, where some of them know the Trainer.
        backward: runs the backward pass of a loss, with the module's hooks around it.
        gradients_only: while a step is captured whose hooks run on the host: ``backward`` gives the gradients, and calls nobody.
        step_optimizer: makes the update of an optimizer, after its closure, with the hooks in between.
    """

    __slots__ = (
        "backward",
        "device",
        "devices",
        "executor",
        "gradients_only",
        "kept",
        "lightning_optimizers",
        "mesh",
        "model",
        "module",
        "optimizers",
        "placed",
        "step_optimizer",
    )

    def __init__(self) -> None:
        self.devices: Sequence[Any] = ()
        self.mesh: Mesh | None = None
        self.module: LightningModule | None = None
        self.model: Any = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lightning_optimizers: list[LightningOptimizer] = []
        self.device = torch.device("cpu")
        self.placed: ModelState | None = None
        self.executor: SetsUpRun | None = None
        self.kept: KeptSteps | None = None
        self.backward: Callable[..., Any] | None = None
        self.gradients_only = False
        self.step_optimizer: Callable[..., Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}  # devices, arrays and a run stay in their process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshRun:
        """Copy for the same mesh, with copies of what the user gave; the run itself is left behind."""
        new = memo[id(self)] = MeshRun()
        new.devices, new.mesh = self.devices, self.mesh
        for name in ("module", "model", "optimizers"):  # the wrapped ones are made of these
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new

    def forget(self) -> None:
        """The run is over; the mesh, the module and its optimizers stay."""
        self.placed, self.device = None, torch.device("cpu")
        self.executor = self.backward = self.step_optimizer = None
