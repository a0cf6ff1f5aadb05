"""A set of several optimizers over the parameters of one module, for manual optimization."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import torch

from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, Gradients, Params
from torch_compat.step.optimizers.inline import InlineKey, InlineOptimizer
from xlatrain.step.loss_scale import LossScaler
from xlatrain.step.offload import update_from_host


class OptimizerSet:
    """The optimizers of a run, with one state for all: ``{parameter name: {optimizer's index: its state of the parameter}}``.

    A parameter may belong to several. Methods are those of
    :class:`~torch_compat.step.optimizers.functional_optimizer.FunctionalOptimizer`.
    """

    def __init__(self, optimizers: Sequence[FunctionalOptimizer]) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def inline(self) -> dict[int, InlineOptimizer]:
        """The optimizers whose Python runs in the step, by index."""
        return {index: one for index, one in enumerate(self.optimizers) if isinstance(one, InlineOptimizer)}

    @property
    def holders(self) -> tuple[torch.optim.Optimizer, ...]:
        """See :attr:`FunctionalOptimizer.holders`."""
        return tuple(holder for one in self.optimizers for holder in one.holders)

    def inline_inputs(self, opt_state: Mapping[str, Mapping[str, Any]]) -> dict[InlineKey, torch.Tensor]:
        """Tensors without values, like the states of :attr:`inline`: inputs of a captured step."""
        found = {}
        for index, one in self.inline.items():
            found.update({(index, *key): tensor for key, tensor in one.inputs(_of(index, opt_state)).items()})
        return found

    def init(self, params: Params) -> dict[str, dict[str, Any]]:
        """The state before the first step. Pure."""
        return self._joined(optimizer.init(params) for optimizer in self.optimizers)

    def check(self) -> None:
        """See :meth:`FunctionalOptimizer.check`."""
        for optimizer in self.optimizers:
            optimizer.check()

    def static_key(self) -> Hashable:
        """A key of all that needs another program when it changes."""
        return tuple(optimizer.static_key() for optimizer in self.optimizers)

    def update(
        self,
        index: int,
        grads: Gradients,
        opt_state: Mapping[str, Mapping[str, Any]],
        params: Params,
        hyper: Any,
        skip: jax.Array | None = None,
    ) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
        """Step the ``index``-th optimizer; the others' state stays as it is. Pure.

        Args:
            skip: bool scalar: where it is true nothing changes.
        """
        optimizer = self.optimizers[index]
        own = _of(index, opt_state)
        if skip is not None:
            new_here = {name: value for name, value in params.items() if name not in own}
            own = {**own, **(optimizer.init(new_here) if new_here else {})}
        new_params, new = optimizer.update(grads, own, params, hyper)
        if skip is not None:
            new_params, new = LossScaler.keep_if(skip, (dict(params), own), (new_params, new))
        joined = {name: dict(states) for name, states in opt_state.items()}
        for name, state in new.items():
            joined.setdefault(name, {})[str(index)] = state
        return new_params, joined

    def update_from_host(
        self,
        index: int,
        grads: Gradients,
        opt_state: Mapping[str, Mapping[str, Any]],
        params: Params,
        hyper: Any,
        skip: jax.Array | None = None,
    ) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """:meth:`update` of state in host memory, one parameter after the other (:mod:`xlatrain.step.offload`). Pure."""

        def one(grads: Any, opt_state: Any, params: Any) -> tuple[dict[str, jax.Array], dict[str, Any]]:
            return self.update(index, grads, opt_state, params, hyper, skip)

        return update_from_host(one, grads, opt_state, params)

    def import_state(self, params: Params) -> dict[str, dict[str, Any]]:
        """The state that the torch optimizers have now, placed like the parameters."""
        return self._joined(optimizer.import_state(params) for optimizer in self.optimizers)

    def write_states(self, opt_state: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the state into the torch optimizers. Collective."""
        for index, optimizer in enumerate(self.optimizers):
            optimizer.write_state(_of(index, opt_state))

    def export_states(self, opt_state: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Write the state into the torch optimizers; gives the ``state_dict()`` of each. Collective."""
        return [optimizer.export_state(_of(index, opt_state)) for index, optimizer in enumerate(self.optimizers)]

    @staticmethod
    def _joined(states: Any) -> dict[str, dict[str, Any]]:
        joined: dict[str, dict[str, Any]] = {}
        for index, state in enumerate(states):
            for name, one in state.items():
                joined.setdefault(name, {})[str(index)] = one
        return joined


def _of(index: int, opt_state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The part of the state that belongs to one optimizer."""
    return {name: states[str(index)] for name, states in opt_state.items() if str(index) in states}
