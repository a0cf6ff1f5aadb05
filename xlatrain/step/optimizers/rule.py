"""Update rules of optimizers: pure functions of one parameter, its gradient, its state and the option values."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp

from xlatrain.step.optimizers.blocks import log, new_step, number

State: TypeAlias = dict[str, jax.Array]
"""The state of one parameter, with the names that ``torch.optim`` gives it (``exp_avg``, ``step``, …)."""

Options: TypeAlias = Mapping[str, Any]
"""A param group's options as the user sees them now: Python numbers, flags, tuples of numbers."""

Numbers: TypeAlias = Any
"""The rule's own named tuple of scalars: Python floats on the host, traced scalars in the program."""

_IN_TUPLES = {
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "eps1": ("eps", 0),
    "eps2": ("eps", 1),
    "eta_minus": ("etas", 0),
    "eta_plus": ("etas", 1),
    "step_size_min": ("step_sizes", 0),
    "step_size_max": ("step_sizes", 1),
}
"""Numbers that are an entry of an option, and of which."""


def numbers_of(names: str) -> Any:
    """The named tuple of a rule's numbers, which are named with spaces between; see :meth:`UpdateRule.number`."""
    return collections.namedtuple("Numbers", names)


@dataclasses.dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """An optimizer's update for one parameter. Instances are hashable: their fields are the flags that shape the program.

    Everything numeric is *not* a field: it arrives as :data:`Numbers` at run time, so that a schedule never recompiles.
    What float32 would lose (``1 - beta2``, ``log(beta2)``) is derived in double by :meth:`numbers` on the host.
    """

    OPTIONS: ClassVar[tuple[str, ...]]
    """Every option of a param group that :meth:`from_options`, :meth:`numbers` or :meth:`init` reads."""
    NUMBERS: ClassVar[Any]
    """The type of what :meth:`numbers` gives and :meth:`update` takes, made by :func:`numbers_of`."""
    ZEROS: ClassVar[tuple[str, ...]] = ()
    """State that begins as zeros of the parameter's shape."""
    HIDDEN: ClassVar[tuple[str, ...]] = ()
    """State that torch does not keep, because it is implied there by an entry being present."""
    INITIAL: ClassVar[tuple[str, ...]] = ()
    """The options that :meth:`init` reads."""
    SCALARS: ClassVar[tuple[str, ...]] = ("step",)
    """State that is one float32 scalar whatever the parameter's shape and dtype."""
    EAGER: ClassVar[bool] = False
    """True where torch makes the state in the optimizer's constructor, not at the first gradient."""

    maximize: bool = False

    @classmethod
    def from_options(cls, options: Options) -> UpdateRule:
        """The rule with the flags of a param group; a flag that the group does not have keeps its default."""
        flags = {field.name: bool(options[field.name]) for field in dataclasses.fields(cls) if field.name in options}
        return cls(**flags)

    def initial(self, options: Options) -> tuple[tuple[str, float], ...]:
        """The options that :meth:`init` reads, with their values; hashable."""
        return tuple((name, number(options[name])) for name in self.INITIAL)

    def numbers(self, options: Options) -> Numbers:
        """The option values as Python floats, derived in double; called on the host, a few µs."""
        return self.NUMBERS(*(self.number(name, options) for name in self.NUMBERS._fields))

    def number(self, name: str, options: Options) -> float:
        """An option, or what its name says of it.

        ``one_minus_momentum`` is 1 less ``momentum``, ``log_beta2`` the logarithm of ``beta2``; ``decay_factor`` is what
        decoupled weight decay multiplies the parameter by.
        """
        if name.startswith("one_minus_"):
            return 1 - self.number(name.removeprefix("one_minus_"), options)
        if name.startswith("log_"):
            return log(self.number(name.removeprefix("log_"), options))
        if name == "decay_factor":
            return 1 - self.number("lr", options) * self.number("weight_decay", options)
        if name in _IN_TUPLES:
            option, place = _IN_TUPLES[name]
            return number(options[option][place])
        return number(options[name])

    def init(self, param: jax.Array, options: Options) -> State:
        """The state before the first gradient: arrays of the parameter's shape and dtype, and float32 scalars."""
        return {"step": new_step(), **{name: jnp.zeros_like(param) for name in self.ZEROS}}

    @abc.abstractmethod
    def update(
        self, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers, dtype: jnp.dtype
    ) -> tuple[jax.Array, State]:
        """The new parameter and state.

        Arrays come real and at least float32, and ``grad`` already negated for ``maximize`` (:func:`apply_rule` sees to
        both); ``dtype`` is the parameter's own. The new parameter is returned rather than a difference, because
        ``p * (1 - lr * weight_decay)`` is how torch rounds.

        Args:
            grad, param: arrays of one shape.
            state: name → array of that shape, or a scalar for the names of :attr:`SCALARS`.
            numbers: :attr:`NUMBERS` of scalars in the dtype of ``param``.
        """


def apply_rule(rule: UpdateRule, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers) -> tuple[jax.Array, State]:
    """Update one parameter, in the dtypes of ``param`` and ``state``.

    Half precision is computed in float32 and rounded once when stored (as torch's fused implementations do). A complex
    parameter is a pair of real ones, as in ``torch.view_as_real``.

    Args:
        grad, param: arrays of one shape; ``grad`` may have another dtype.
        state: what :meth:`UpdateRule.init` or an earlier update gave.

    Raises:
        ValueError: ``state`` lacks an entry that the rule's flags need (a flag was switched on in mid-training).
    """
    if jnp.iscomplexobj(param):
        return _apply_to_pairs(rule, grad, state, param, numbers)
    compute_dtype = jnp.promote_types(param.dtype, jnp.float32)
    up = {name: value.astype(compute_dtype) for name, value in state.items()}
    grad = grad.astype(compute_dtype)
    scalars = type(numbers)(*(jnp.asarray(number, compute_dtype) for number in numbers))
    try:
        new_param, new_state = rule.update(
            -grad if rule.maximize else grad, up, param.astype(compute_dtype), scalars, param.dtype
        )
    except KeyError as error:
        raise ValueError(
            f"{type(rule).__name__}: the optimizer state has no {error.args[0]!r}, which {rule} needs (it has "
            f"{sorted(state)}); was a flag such as amsgrad, centered or momentum switched on after the first step? "
            "Start from a fresh optimizer state"
        ) from None
    stored = {name: _store(rule, name, value, state.get(name), param) for name, value in new_state.items()}
    return new_param.astype(param.dtype), stored


def _store(rule: UpdateRule, name: str, value: jax.Array, old: jax.Array | None, param: jax.Array) -> jax.Array:
    """A new state entry in the dtype of the old one; of a new entry float32 for scalars, else the parameter's dtype."""
    if old is not None:
        return value.astype(old.dtype)
    return value.astype(jnp.float32 if name in rule.SCALARS else param.dtype)


def _apply_to_pairs(
    rule: UpdateRule, grad: jax.Array, state: State, param: jax.Array, numbers: Numbers
) -> tuple[jax.Array, State]:
    """Update a complex parameter ``[…]`` as a real one ``[…, 2]``."""
    real_state = {name: _as_real(value) if jnp.iscomplexobj(value) else value for name, value in state.items()}
    new_param, new_state = apply_rule(rule, _as_real(grad.astype(param.dtype)), real_state, _as_real(param), numbers)
    complex_shape = (*param.shape, 2)
    return _as_complex(new_param), {
        name: _as_complex(value) if value.shape == complex_shape else value for name, value in new_state.items()
    }


def _as_real(z: jax.Array) -> jax.Array:
    """The real and imaginary parts: complex ``[…]`` → real ``[…, 2]``."""
    return jnp.stack([jnp.real(z), jnp.imag(z)], axis=-1)


def _as_complex(pair: jax.Array) -> jax.Array:
    """The inverse of :func:`_as_real`: real ``[…, 2]`` → complex ``[…]``."""
    return jax.lax.complex(pair[..., 0], pair[..., 1])
