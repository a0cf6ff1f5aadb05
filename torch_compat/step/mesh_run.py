"""The internals of a strategy in a run, besides the members that Lightning documents: the seam to its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from torch_compat.core.module import LightningModule
    from torch_compat.core.optimizer import LightningOptimizer
    from torch_compat.step.model_state import ModelState


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
        place_model: puts the module on the mesh, or decides that steps run eagerly.
        make_optimizers: calls ``configure_optimizers`` and compiles the update.
        backward: runs the backward pass of a loss, with the module's hooks around it.
        gradients_only: while a step is captured whose hooks run on the host: ``backward`` gives the gradients, and calls nobody.
        step_optimizer: makes the update of an optimizer, after its closure, with the hooks in between.
        optimizer_state: ``state_dict()`` of an optimizer with what is on the mesh.
        load_optimizer_states: gives the optimizers such states.
    """

    __slots__ = (
        "backward",
        "device",
        "devices",
        "gradients_only",
        "lightning_optimizers",
        "load_optimizer_states",
        "make_optimizers",
        "mesh",
        "model",
        "module",
        "optimizer_state",
        "optimizers",
        "place_model",
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
        self.place_model: Callable[[], None] | None = None
        self.make_optimizers: Callable[[], None] | None = None
        self.backward: Callable[..., Any] | None = None
        self.gradients_only = False
        self.step_optimizer: Callable[..., Any] | None = None
        self.optimizer_state: Callable[[torch.optim.Optimizer], dict[str, Any]] | None = None
        self.load_optimizer_states: Callable[[Sequence[Mapping[str, Any]]], None] | None = None

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
        self.place_model = self.make_optimizers = self.backward = self.step_optimizer = None
        self.optimizer_state = self.load_optimizer_states = None
