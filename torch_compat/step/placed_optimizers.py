"""The optimizers of a run whose state is on the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch

from torch_compat.step.model_state import ModelState
from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer
from torch_compat.step.optimizers.live_state import LiveOptimizerStates, states_kept
from torch_compat.step.optimizers.optimizer_set import OptimizerSet
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.optimizers.state import read_exported
from xlatrain.bridge.errors import CaptureError


class PlacedOptimizers:
    """Optimizers with their state on the mesh, which begins with what they have.

    Args:
        model: the module on the mesh.
        functional: the pure form of the optimizer, or of all where steps run them themselves.
        optimizers: torch's, in order.
    """

    def __init__(
        self,
        model: ModelState,
        functional: FunctionalOptimizer | OptimizerSet,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.functional = functional
        self.optimizers = list(optimizers)
        self._model = model
        frozen = functional.frozen_init() if isinstance(functional, FunctionalOptimizer) else None
        model.add_optimizer(frozen or functional.init)
        self._holders = functional.holders
        if any(one.state for one in self._holders):
            self._load()
        self._live: LiveOptimizerStates | None = LiveOptimizerStates(self._holders, self._fetch, self._load)

    def _fetch(self) -> None:
        self.functional.write_states(self._model.state.opt_state)

    def _load(self) -> None:
        self._model.load_optimizer(self.functional.import_state)

    def begin_step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look for what user code did to the optimizers since the last step, and push it to the mesh.

        Args:
            optimizers: which the run has now.

        Raises:
            CaptureError: these are others, which compiled steps do not have, have hooks that do not run before their steps, or
                parameters that are not the module's.
        """
        self.check_same(optimizers)
        self.check()

    def check(self) -> None:
        """A step is about to be taken: push what user code did to the states.

        Raises:
            CaptureError: it cannot be compiled any longer.
        """
        with _refused_as_step():
            self.functional.check()
            if (live := self._live) is not None and live.shared():
                raise UnsupportedOptimizerError(
                    "two places of the optimizers' states have one tensor, which torch updates from both: load_state_dict does "
                    "not copy what it is given. Give it copy.deepcopy(other.state_dict())"
                )
            if live is not None and live.shown():
                raise UnsupportedOptimizerError(
                    "a view or an array of a tensor in an optimizer's state is kept, which torch's steps write to. Keep the "
                    "tensor itself, or a copy (.clone())"
                )
            self.push()

    def check_same(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse other optimizers, see :meth:`begin_step`."""
        if optimizers != self.optimizers:
            raise CaptureError(
                "trainer.optimizers was assigned other optimizers than configure_optimizers returned: a compiled step has those. "
                "Change the options and param groups of the old ones instead"
            )

    def push(self) -> None:
        """Push to the mesh what user code did to the states that it has seen."""
        if self._live is not None:
            self._live.push()

    @property
    def is_whole(self) -> bool:
        """Whether each device has the whole state."""
        return all(leaf.is_fully_replicated for leaf in jax.tree.leaves(self._model.state.opt_state))

    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """``optimizer.state_dict()``, with the state that is on the mesh if it is one of these.

        Tensors are read from the mesh when something needs their values, which must be before the next step.
        """
        index = next((i for i, one in enumerate(self.optimizers) if one is optimizer), None)
        if index is None:
            return optimizer.state_dict()
        if self._live is not None and self._live.shared():  # the next step is eager
            return optimizer.state_dict()
        self.push()
        with states_kept(self._holders):
            return self.functional.export_states(self._model.state.opt_state)[index]

    def load(self, states: Iterable[tuple[torch.optim.Optimizer, Mapping[str, Any]]]) -> None:
        """Give optimizers such states, on the mesh; the others keep theirs."""
        for optimizer, state in states:
            optimizer.load_state_dict(dict(state))
        if self._live is None or not self._live.shared():
            self.push()

    def release(self, *, to_host: bool = True, failed: bool = False, others: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Give the optimizers their state, and the mesh its memory.

        Args:
            to_host: it fits there.
            failed: the run ended with an error, maybe inside of a step, whose donated arrays are gone.
            others: optimizers that were given states of these.
        """
        seen = self._live is not None and self._live.end(failed=failed)
        self._live = None
        if to_host and not seen:
            with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
                self._fetch()
                self._model.drop_optimizer()
                for optimizer in {id(one): one for one in (*self._holders, *others)}.values():
                    read_exported(optimizer)


@contextlib.contextmanager
def _refused_as_step() -> Iterator[None]:
    """Make the refusals of optimizers those of the step, which goes on without being compiled."""
    try:
        yield
    except UnsupportedOptimizerError as error:
        raise CaptureError(str(error)) from error
