"""The optimizers of a user's module as pure functions of arrays."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_compat.step.optimizers.frozen_update import FrozenInit, FrozenUpdate
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError

Params = Mapping[str, jax.Array]
Gradients = Mapping[str, jax.Array | None]

_NO_HOOKS: Mapping[int, Any] = {}
"""Those of an optimizer whose class does not call ``super().__init__()``: one that holds another."""


def real_dtype(parameters: Iterable[torch.Tensor]) -> type[np.floating[Any]]:
    """The dtype of the numbers of an optimizer of these parameters: float64 where one is of 64 bits, else float32."""
    return np.float64 if any(param.dtype in (torch.float64, torch.complex128) for param in parameters) else np.float32


class FunctionalOptimizer(abc.ABC):
    """An optimizer split into pure functions (:meth:`init`, :meth:`update`) and what the host reads (:meth:`options`, …).

    :func:`~torch_compat.step.optimizers.forms.functional_form` makes the one for an optimizer. A loop does, with ``update``
    inside its compiled program::

        functional = functional_form(optimizer, {p: name for name, p in module.named_parameters()})
        opt_state = functional.import_state(params)
        params, opt_state = program(grads, opt_state, params, functional.hyper())  # another program per static_key()
        functional.notify_step()

    ``params``, ``grads`` and ``opt_state`` are dicts keyed by parameter name. Half-precision parameters are computed in
    float32 and rounded once when stored, as torch's fused kernels do.

    Attributes:
        by_parameter: whether :meth:`update` may be given any subset of the parameters: each is updated by itself.
        makes_state_in_step: whether :meth:`update` gives a state with entries that :meth:`init` has not.
        holders: the torch optimizers whose ``state`` it is: itself, and those that it holds where their Python runs in the step.
    """

    by_parameter: ClassVar[bool] = False
    makes_state_in_step: ClassVar[bool] = False

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self.optimizer: Any = optimizer
        self.holders: tuple[torch.optim.Optimizer, ...] = (optimizer,)
        self._names = names

    def host_state(self) -> list[dict[Any, Any]]:
        """The dicts in which a step changes numbers on the host."""
        return list(self.optimizer.param_groups)

    def members(self) -> set[str]:
        """The names of the parameters in its groups, as these are now."""
        return {self._names[param] for group in self.optimizer.param_groups for param in group["params"]}

    @abc.abstractmethod
    def init(self, params: Params) -> Any:
        """The state before the first step, for the parameters that require gradients. Pure: may run under ``jax.jit``.

        Gives a dict of parameter name → dict of arrays, named, shaped and typed as torch's (``exp_avg``, …).
        """

    def frozen_init(self) -> FrozenInit | None:
        """:meth:`init` as it is now, without the optimizer; None where it needs it."""
        return None

    @abc.abstractmethod
    def options(self) -> tuple[np.ndarray, Hashable]:
        """:meth:`hyper` and :meth:`static_key`, for which the groups are read once."""

    def hyper(self) -> np.ndarray:
        """Every numeric group option as it is now: float32[n] (float64 where a parameter is), an input of the program.

        Values that float32 could not derive (``1 - beta2``, ``log(beta2)``) come computed in double. It is the same,
        read-only array object for as long as no option changed, so a device copy may be kept by identity.
        """
        return self.options()[0]

    def static_key(self) -> Hashable:
        """Equal for as long as a program made from :meth:`update` stays valid: flags and group membership."""
        return self.options()[1]

    @abc.abstractmethod
    def update(self, grads: Gradients, opt_state: Any, params: Params, hyper: Any) -> tuple[dict[str, jax.Array], Any]:
        """Take a step: the new parameters and state. Pure.

        A parameter whose gradient is None or absent keeps its value and its state, step count included; parameters in no
        group are passed through.

        Args:
            grads: name → array of the parameter's shape, or None.
            opt_state: what :meth:`init`, :meth:`import_state` or an earlier update gave.
            params: name → array; shapes and dtypes are kept.
            hyper: what :meth:`hyper` gave, float32[n] (float64 where a parameter is).
        """

    def stackable(self, paths: Iterable[str], opt_state: Any) -> bool:
        """Whether :meth:`update` takes these parameters as one stack (:mod:`xlatrain.step.stacking`), with the same numbers."""
        return False

    def frozen(self) -> FrozenUpdate | None:
        """:meth:`update` as it is now, without the optimizer; None where it needs it."""
        return None

    @abc.abstractmethod
    def import_state(self, params: Params) -> Any:
        """The state that ``optimizer`` has now (none: as :meth:`init`), placed like the given, concrete parameters.

        Raises:
            ValueError: the optimizer's state lacks an entry that its options need, or has one of another shape.
        """

    @abc.abstractmethod
    def write_state(self, opt_state: Any) -> None:
        """Write ``opt_state`` into ``optimizer.state`` as CPU tensors.

        Where the arrays span processes this is collective: every process must call it.
        """

    def write_states(self, opt_state: Any) -> None:
        """:meth:`write_state` under the name that several optimizers have for it."""
        self.write_state(opt_state)

    def export_state(self, opt_state: Any) -> dict[str, Any]:
        """:meth:`write_state`, and give ``optimizer.state_dict()``."""
        self.write_state(opt_state)
        return self.optimizer.state_dict()

    def export_states(self, opt_state: Any) -> list[dict[str, Any]]:
        """:meth:`export_state` as a list with one entry per optimizer, here one."""
        return [self.export_state(opt_state)]

    def notify_step(self) -> None:
        """Tell the optimizer that a step was taken: :meth:`mark_stepped` and :meth:`run_post_hooks`."""
        self.mark_stepped()
        self.run_post_hooks()

    def check(self) -> None:
        """A step is about to be taken.

        Raises:
            UnsupportedOptimizerError: a ``register_step_pre_hook`` hook was registered since it was made; or the update
                would be compiled again and again, since what the optimizer's own code needs as a constant changes.
        """
        refuse_pre_hooks(self.optimizer)

    def mark_stepped(self) -> None:
        """Schedulers that run from now on do not warn that they run before the optimizer.

        Raises:
            UnsupportedOptimizerError: a ``register_step_pre_hook`` hook was registered in this step.
        """
        self.optimizer._opt_called = True
        refuse_pre_hooks(self.optimizer)

    def run_post_hooks(self) -> None:
        """Call the hooks registered by ``register_step_post_hook``, with ``(optimizer, (), {})``."""
        optimizer = self.optimizer
        own = getattr(optimizer, "_optimizer_step_post_hooks", _NO_HOOKS)
        if own or _global_optimizer_post_hooks:
            for hook in (*own.values(), *_global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})


def refuse_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has hooks before its steps.

    Raises:
        UnsupportedOptimizerError: it has.
    """
    if getattr(optimizer, "_optimizer_step_pre_hooks", _NO_HOOKS) or _global_optimizer_pre_hooks:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has hooks of register_step_pre_hook (or register_optimizer_step_pre_hook): they would "
            "see gradients that exist inside the compiled step only; use the on_before_optimizer_step hook of the module "
            "or of a callback, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
        )
