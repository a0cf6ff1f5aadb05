"""Transformations of optax as optimizers of torch parameters: in compiled steps as they are, in eager ones on the CPU."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.optim import Optimizer

from torch_compat.step.optimizers.functional_optimizer import FunctionalOptimizer, Gradients, Params, real_dtype
from torch_compat.step.optimizers.param_group import name_of
from torch_compat.step.optimizers.state import exported, make_state, place_state, place_unread, scalars_on_host
from torch_compat.utilities.host_arrays import to_torch
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.step.optimizers.blocks import number
from xlatrain.step.optimizers.by_parameter import ByParameter
from xlatrain.step.optimizers.rule import State

if TYPE_CHECKING:
    import optax


def is_transformation(value: Any) -> bool:
    """Whether it is an ``optax.GradientTransformation``."""
    optax = sys.modules.get("optax")  # who has made one has imported it; that takes 0.1 s
    return optax is not None and isinstance(value, optax.GradientTransformation)


class OptaxOptimizer(Optimizer):
    """An optax transformation that updates these parameters; schedules are part of it.

    A LightningModule returns the transformation itself from ``configure_optimizers``, for all of its parameters, or several of
    these, each of its own.

    Its ``state`` has, for each parameter, the entries of optax's state by path (``"0.mu"``) as tensors. Its param group has the
    numbers that ``optax.inject_hyperparams`` keeps in that state, ``learning_rate`` as ``lr``; they may be read and set, also by
    schedulers and callbacks. Other options there are none: numbers that optax computes by a schedule are optax's.

    Args:
        transformation: made by ``optax``. It is given dicts of arrays by parameter name.
        named_parameters: as of ``module.named_parameters()``; those that require no gradient are left out.

    Raises:
        ValueError: no parameter requires a gradient; the transformation cannot update them (:meth:`ByParameter.check`).

    API: https://optax.readthedocs.io/en/latest/api/transformations.html
    """

    def __init__(
        self, transformation: optax.GradientTransformation, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
    ) -> None:
        self.transformation = ByParameter(transformation)
        self.names: dict[torch.Tensor, str] = {param: name for name, param in named_parameters if param.requires_grad}
        if not self.names:
            raise ValueError("OptaxOptimizer got no parameter that requires a gradient")
        specs = {name: jax.ShapeDtypeStruct(tuple(param.shape), jax_dtype(param.dtype)) for param, name in self.names.items()}
        self.transformation.check(specs)
        super().__init__(list(self.names), {})
        injected = self.transformation.injected(specs)
        self.paths = {_OPTION.get(path.rpartition(".")[2], path.rpartition(".")[2]): path for path in injected}
        values = {option: injected[path] for option, path in self.paths.items()}
        self.param_groups = [_Group({**self.param_groups[0], **values})]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "transformation": self.transformation, "names": self.names, "paths": self.paths}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(
                "OptaxOptimizer takes no further param group: its transformation is made for all parameters. Options by "
                "parameter are optax.multi_transform's"
            )
        super().add_param_group(param_group)

    @functools.cached_property
    def _update(self) -> Callable[..., Any]:
        # Once: jit knows a bound method by the object, which is a new one each time.
        return jax.jit(self.transformation.update)  # without compiler_options: of eager steps, on no mesh

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters by XLA on the CPU: where a step is not compiled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped = {name: param for param, name in self.names.items() if param.grad is not None}
        params: Any = {name: as_numpy(param.detach().cpu()) for name, param in stepped.items()}
        grads = {name: as_numpy(param.grad.cpu()) for name, param in stepped.items() if param.grad is not None}
        state: Any = {
            name: {path: as_numpy(value) for path, value in self.state[param].items()}
            for param, name in self.names.items()
            if param in self.state
        }
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            if self.paths:
                state = self.with_options(state or self.transformation.init(params), self.options())
            new, new_state = self._update(grads, state, params)
        for param, name in self.names.items():
            if name in new:
                param.copy_(to_torch(np.array(new[name]), param.dtype))
            if name in new_state:
                self.state[param] = {path: to_torch(np.array(value)) for path, value in new_state[name].items()}
        return loss

    def options(self) -> list[float]:
        """The numbers of the param group that are in optax's state."""
        group = self.param_groups[0]
        return [number(group[option]) for option in self.paths]

    def with_options(self, state: Mapping[str, State], values: Any) -> dict[str, State]:
        """``state`` with these numbers in it. Pure.

        Args:
            state: by parameter name and path.
            values: float32[n] (float64 where a parameter is), those of :meth:`options`.
        """
        paths = list(self.paths.values())
        return {
            name: {
                **entries,
                **{path: jnp.asarray(values[i], entries[path].dtype) for i, path in enumerate(paths) if path in entries},
            }
            for name, entries in state.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state like torch's, but each entry keeps its dtype: torch makes counts numbers of the parameter's dtype.

        Raises:
            ValueError: a state of another number of parameters.
        """
        groups = state_dict["param_groups"]
        indices = [index for group in groups for index in group["params"]]
        if len(indices) != len(self.names):
            raise ValueError(f"the state_dict is of {len(indices)} parameters, and OptaxOptimizer has {len(self.names)}")
        self.param_groups[0].update(
            {option: groups[0][option] for option in groups[0] if option in self.paths or option == "initial_lr"}
        )
        found = state_dict["state"]
        self.state = defaultdict(
            dict, {param: dict(found[index]) for index, param in zip(indices, self.names, strict=True) if index in found}
        )


_OPTION = {"learning_rate": "lr"}
"""The name of a number of optax's in a param group, where torch has its own."""


class _Group(dict[str, Any]):
    """A param group whose only options are the numbers that optax keeps in its state."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(_no_option(key))

    def __setitem__(self, key: str, value: Any) -> None:
        if "lr" not in self and key not in self:  # where there is a rate, its schedulers keep notes here
            raise KeyError(_no_option(key))
        super().__setitem__(key, value)


def _no_option(key: str) -> str:
    return (
        f"{key}: an optax transformation has no options that could be read or set, but those that are injected: "
        "optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3). A rate that is a schedule is computed in the step; log it "
        "there: self.log('lr', schedule(self.global_step))"
    )


class FunctionalOptax(FunctionalOptimizer):
    """An :class:`OptaxOptimizer` by its transformation."""

    def __init__(self, optimizer: OptaxOptimizer, names: Mapping[torch.Tensor, str]) -> None:
        super().__init__(optimizer, names)
        self._transformation = optimizer.transformation
        self._own_names = {
            name_of(names, param, 0, position): (param, own) for position, (param, own) in enumerate(optimizer.names.items())
        }
        self._key = (id(self._transformation), tuple(self._own_names))
        self._options: list[float] | None = None
        self._real = real_dtype(names)
        self._vector = np.zeros(0, self._real)

    def options(self) -> tuple[np.ndarray, Hashable]:
        if (now := self.optimizer.options()) != self._options:
            self._options, self._vector = now, np.array(now, self._real)
            self._vector.flags.writeable = False
        return self._vector, self._key

    def init(self, params: Params) -> dict[str, State]:
        return self._renamed(self._transformation.init(self._own(params)))

    def update(
        self, grads: Gradients, opt_state: Mapping[str, State], params: Params, hyper: Any
    ) -> tuple[dict[str, jax.Array], dict[str, State]]:
        own = self.optimizer.with_options(self._own(opt_state), hyper)
        new, state = self._transformation.update(self._own(grads), own, self._own(params))
        return {**params, **self._renamed(new)}, {**opt_state, **self._renamed(state)}

    def import_state(self, params: Params) -> dict[str, State]:
        of_ours = {name: params[name] for name in self._own_names}
        template = jax.eval_shape(self.init, of_ours)
        if not any(self.optimizer.state.get(param) for param, _ in self._own_names.values()):
            return make_state(self.init, of_ours)
        state: dict[str, State] = {}
        for name, (param, _) in self._own_names.items():
            saved = self.optimizer.state.get(param) or {}
            if saved.keys() != template[name].keys():
                raise ValueError(
                    f"the optimizer's state for parameter {name!r} has the entries {sorted(saved)}, and the present optax "
                    f"transformation {sorted(template[name])}; was it saved with another one?"
                )
            state[name] = {path: place_state(saved[path], params[name], spec.dtype) for path, spec in template[name].items()}
        return place_unread(state)

    def write_state(self, opt_state: Mapping[str, State]) -> None:
        host = scalars_on_host(opt_state)
        for name, (param, _) in self._own_names.items():
            if name in host:
                self.optimizer.state[param] = {path: exported(value) for path, value in host[name].items()}

    def _own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of this optimizer's parameters, under the names that it knows."""
        return {own: values[name] for name, (_, own) in self._own_names.items() if name in values}

    def _renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The other way."""
        return {name: values[own] for name, (_, own) in self._own_names.items() if own in values}
