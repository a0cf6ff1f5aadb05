"""The optimizers of a user's module as pure functions of arrays."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_compat.step.optimizers.captured import CapturedOptimizer
from torch_compat.step.optimizers.frozen_update import FrozenInit, FrozenUpdate
from torch_compat.step.optimizers.inline import InlineOptimizer, members_of
from torch_compat.step.optimizers.optax_optimizer import OptaxOptimizer, OptaxProgram
from torch_compat.step.optimizers.param_group import UnsupportedOptimizerError
from torch_compat.step.optimizers.table import TableOptimizer, has_rule
from torch_compat.step.values.mocks import stands_in

Params = Mapping[str, jax.Array]
Gradients = Mapping[str, jax.Array | None]

_NO_HOOKS: Mapping[int, Any] = {}
"""Those of an optimizer whose class does not call ``super().__init__()``: one that holds another."""
_REFUSED = {
    torch.optim.LBFGS: "it evaluates its closure several times in one step, as often as the line search wants",
    torch.optim.SparseAdam: "it needs sparse gradients, and XLA has only dense ones",
}
_INSTEAD = {
    torch.optim.LBFGS: "use a first-order optimizer such as torch.optim.AdamW",
    torch.optim.SparseAdam: "use torch.optim.Adam and nn.Embedding(sparse=False)",
}


class OptimizerProgram(Protocol):
    """The methods of an implementation of :class:`FunctionalOptimizer`, which documents them."""

    def init(self, params: Params) -> Any: ...
    def hyper(self) -> np.ndarray: ...
    def static_key(self) -> Hashable: ...
    def options(self) -> tuple[np.ndarray, Hashable]: ...
    def update(self, grads: Gradients, opt_state: Any, params: Params, hyper: Any) -> tuple[dict[str, jax.Array], Any]: ...
    def import_state(self, params: Params) -> Any: ...
    def write_state(self, opt_state: Any) -> None: ...


class FunctionalOptimizer:
    """An optimizer split into pure functions (:meth:`init`, :meth:`update`) and what the host reads (:meth:`hyper`, …).

    A loop does, with ``update`` inside its compiled program::

        functional = FunctionalOptimizer.from_torch(optimizer, {p: name for name, p in module.named_parameters()})
        opt_state = functional.import_state(params)
        params, opt_state = program(grads, opt_state, params, functional.hyper())  # another program per static_key()
        functional.notify_step()

    ``params``, ``grads`` and ``opt_state`` are dicts keyed by parameter name. Half-precision parameters are computed in
    float32 and rounded once when stored, as torch's fused kernels do.
    """

    def __init__(self, program: OptimizerProgram, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._program = program
        self._names = names
        self.optimizer = optimizer
        # Bound once: these are called in every step.
        self.hyper = program.hyper
        self.static_key = program.static_key
        self.options = program.options

    @classmethod
    def from_torch(cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> FunctionalOptimizer:
        """The functional form of ``optimizer``.

        One that is exactly of a class of ``torch.optim`` is mapped to the same update in JAX, a transformation of optax is used
        as it is; the ``step()`` of any other is captured
        (:class:`~torch_compat.step.optimizers.captured.CapturedOptimizer`).

        Args:
            optimizer: stays the user's: its ``param_groups`` are read every step, its state through
                :meth:`import_state` and :meth:`export_state`. Its options ``foreach``, ``fused`` and ``capturable`` choose
                among implementations of the same update and have no effect here.
            names: parameter → its name in the module, for every parameter of the optimizer.

        Raises:
            UnsupportedOptimizerError: an optimizer that needs the eager executor (L-BFGS, SparseAdam, ``differentiable=True``),
                or has a parameter that is not in ``names``.
        """
        _refuse(optimizer)
        if type(optimizer) is OptaxOptimizer:
            return cls(OptaxProgram(optimizer, names), optimizer, names)
        if has_rule(optimizer):
            return cls(TableOptimizer(optimizer, names), optimizer, names)
        return cls(CapturedOptimizer(optimizer, names), optimizer, names)

    @classmethod
    def in_step(cls, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> FunctionalOptimizer:
        """The form of an optimizer that :meth:`from_torch` refuses, and whose Python may run in a captured step.

        Raises:
            UnsupportedOptimizerError: as :meth:`from_torch`, of it and of the optimizers that it holds.
        """
        for member in members_of(optimizer):
            _refuse(member)
        return cls(InlineOptimizer(optimizer, names), optimizer, names)

    @property
    def inline(self) -> InlineOptimizer | None:
        """The optimizer, if its Python runs in the step."""
        return self._program if isinstance(self._program, InlineOptimizer) else None

    @property
    def holders(self) -> tuple[torch.optim.Optimizer, ...]:
        """The torch optimizers whose ``state`` it is: itself, and those that it holds where their Python runs in the step."""
        return (self.optimizer,) if self.inline is None else self.inline.members

    def host_state(self) -> list[dict[Any, Any]]:
        """The dicts in which a step changes numbers on the host."""
        if (inline := self.inline) is not None:
            return [*inline.groups(), inline.numbers]
        return [] if self.optimizer is None else list(self.optimizer.param_groups)

    def members(self) -> set[str]:
        """The names of the parameters in its groups, as these are now."""
        return {self._names[param] for group in self.optimizer.param_groups for param in group["params"]}

    @property
    def by_parameter(self) -> bool:
        """Whether :meth:`update` may be given any subset of the parameters: each is updated by itself."""
        return isinstance(self._program, TableOptimizer)

    def init(self, params: Params) -> Any:
        """The state before the first step, for the parameters that require gradients. Pure: may run under ``jax.jit``.

        Gives a dict of parameter name → dict of arrays, named, shaped and typed as torch's (``exp_avg``, …).
        """
        return self._program.init(params)

    def frozen_init(self) -> FrozenInit | None:
        """:meth:`init` as it is now, without the optimizer; None where it needs it."""
        return self._program.frozen_init() if isinstance(self._program, TableOptimizer) else None

    def hyper(self) -> np.ndarray:
        """Every numeric group option as it is now: float32[n] (float64 where a parameter is), an input of the program.

        Values that float32 could not derive (``1 - beta2``, ``log(beta2)``) come computed in double. It is the same,
        read-only array object for as long as no option changed, so a device copy may be kept by identity.
        """
        raise NotImplementedError  # bound in __init__

    def static_key(self) -> Hashable:
        """Equal for as long as a program made from :meth:`update` stays valid: flags and group membership."""
        raise NotImplementedError  # bound in __init__

    def options(self) -> tuple[np.ndarray, Hashable]:
        """:meth:`hyper` and :meth:`static_key`, for which the groups are read once."""
        raise NotImplementedError  # bound in __init__

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
        return self._program.update(grads, opt_state, params, hyper)

    def stackable(self, paths: Iterable[str], opt_state: Any) -> bool:
        """Whether :meth:`update` takes these parameters as one stack (:mod:`xlatrain.step.stacking`), with the same numbers."""
        return isinstance(self._program, TableOptimizer) and self._program.stackable(paths, opt_state)

    def frozen(self) -> FrozenUpdate | None:
        """:meth:`update` as it is now, without the optimizer; None where it needs it."""
        return self._program.frozen() if isinstance(self._program, TableOptimizer) else None

    @property
    def makes_state_in_step(self) -> bool:
        """Whether :meth:`update` gives a state with entries that :meth:`init` has not."""
        return isinstance(self._program, CapturedOptimizer | InlineOptimizer)

    def import_state(self, params: Params) -> Any:
        """The state that ``optimizer`` has now (none: as :meth:`init`), placed like the given, concrete parameters.

        Raises:
            ValueError: the optimizer's state lacks an entry that its options need, or has one of another shape.
        """
        return self._program.import_state(params)

    def write_state(self, opt_state: Any) -> None:
        """Write ``opt_state`` into ``optimizer.state`` as CPU tensors.

        Where the arrays span processes this is collective: every process must call it.
        """
        self._program.write_state(opt_state)

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
            UnsupportedOptimizerError: a ``register_step_pre_hook`` hook was registered since :meth:`from_torch`; or the update
                would be compiled again and again, since what the optimizer's own code needs as a constant changes.
        """
        _refuse_pre_hooks(self.optimizer)
        if isinstance(self._program, CapturedOptimizer):
            self._program.check()

    def mark_stepped(self) -> None:
        """Schedulers that run from now on do not warn that they run before the optimizer.

        Raises:
            UnsupportedOptimizerError: a ``register_step_pre_hook`` hook was registered in this step.
        """
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        _refuse_pre_hooks(self.optimizer)

    def run_post_hooks(self) -> None:
        """Call the hooks registered by ``register_step_post_hook``, with ``(optimizer, (), {})``."""
        optimizer = self.optimizer
        own = getattr(optimizer, "_optimizer_step_post_hooks", _NO_HOOKS)
        if own or _global_optimizer_post_hooks:
            for hook in (*own.values(), *_global_optimizer_post_hooks.values()):
                hook(optimizer, (), {})


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} cannot run inside a compiled step: {reason}; {_INSTEAD[kind]}, or "
                "run with the eager executor (XLATRAIN_EXECUTOR=eager)"
            )
    for name in ("step", "zero_grad"):
        if stands_in(getattr(optimizer, name)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__}.{name} is a mock (unittest.mock), which counts calls that a compiled step does "
                "not make: steps run one by one"
            )
    _refuse_pre_hooks(optimizer)


def _refuse_pre_hooks(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_optimizer_step_pre_hooks", _NO_HOOKS) or _global_optimizer_pre_hooks:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has hooks of register_step_pre_hook (or register_optimizer_step_pre_hook): they would "
            "see gradients that exist inside the compiled step only; use the on_before_optimizer_step hook of the module "
            "or of a callback, or run with the eager executor (XLATRAIN_EXECUTOR=eager)"
        )
