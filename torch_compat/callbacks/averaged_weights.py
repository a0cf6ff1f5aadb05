"""Running averages of a model's weights, kept where the weights are: on the mesh, sharded like them, or on the host."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from torch_compat.checkpoint.array_tensors import array_tensor
from torch_compat.utilities.host_arrays import place, to_torch
from xlatrain.bridge.capture.capture import Capture, capture
from xlatrain.bridge.errors import CaptureError
from xlatrain.bridge.lower.interpret import lower
from xlatrain.bridge.tensors.host import as_numpy
from xlatrain.bridge.tensors.live import live_array

if TYPE_CHECKING:
    from torch_compat.step.model_state import ModelState
    from torch_compat.trainer.trainer import Trainer

AveragingFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(averaged, current, num_averaged) -> averaged``: the ``avg_fn`` of ``torch.optim.swa_utils.AveragedModel``."""
MultiAveragingFunction = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor], None]
"""``(averaged, current, num_averaged)``, changes ``averaged`` in place: the ``multi_avg_fn`` of ``AveragedModel``."""


class CurrentWeights(Protocol):
    """The weights that are being trained: tensors of the host or arrays on the mesh, by name."""

    def read(self, names: Sequence[str]) -> dict[str, Any]: ...
    def exchange(self, values: Mapping[str, Any]) -> dict[str, Any]: ...
    def own(self, name: str, value: Any) -> Any: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def average(self, rule: AveragingRule, averaged: dict[str, Any], current: dict[str, Any], count: int) -> dict[str, Any]: ...


def current_weights(trainer: Trainer) -> CurrentWeights:
    """The weights of the run as they are now, wherever its executor keeps them."""
    model = trainer.strategy.placed
    return WeightsOnHost(trainer.lightning_module) if model is None else WeightsOnMesh(model)


class AveragedWeights:
    """Averages of the named parameters and buffers, with ``torch.optim.swa_utils.AveragedModel``'s semantics.

    The first :meth:`update` copies the weights, later ones average.

    Args:
        averaged: parameters, then buffers, in the module's order.
        rule: how they are averaged.
        copied: buffers that each update copies.
    """

    def __init__(self, averaged: Sequence[str], rule: AveragingRule, copied: Sequence[str] = ()) -> None:
        self.count = 0
        self._averaged = list(averaged)
        self._names = [*averaged, *copied]
        self._rule = rule
        self._values: dict[str, Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def start(self, weights: CurrentWeights, values: Mapping[str, torch.Tensor]) -> None:
        """Begin with ``values`` (name → tensor), and copies of the weights that it lacks, in the weights' shapes and dtypes."""
        current = weights.read(self._names)
        self._dtypes = {name: weights.dtype(name) for name in self._names}
        self._values = {name: weights.own(name, values.get(name, value)) for name, value in current.items()}

    def update(self, weights: CurrentWeights) -> None:
        """Take the current weights into the averages."""
        current = weights.read(self._names)
        copied = set(self._names if self.count == 0 else self._names[len(self._averaged) :])
        averages = self._on(weights)
        if self.count > 0:
            averages = weights.average(self._rule, {name: averages[name] for name in self._averaged}, current, self.count)
        self._values = {name: weights.own(name, current[name]) if name in copied else averages[name] for name in self._names}
        self.count += 1

    def swap(self, weights: CurrentWeights) -> None:
        """Exchange averages and current weights."""
        self._values = weights.exchange(self._on(weights))

    def copy_to(self, weights: CurrentWeights) -> None:
        """Overwrite the current weights with the averages."""
        weights.exchange({name: weights.own(name, value) for name, value in self._on(weights).items()})

    def hand_over(self, weights: CurrentWeights) -> None:
        """Overwrite the current weights with the averages, which are gone from here until :meth:`take_back`."""
        weights.exchange(self._on(weights))
        self._values = {}

    def take_back(self, weights: CurrentWeights) -> None:
        """Keep the averages where the weights are after a run; after :meth:`hand_over`, copies of these.

        Weights that stay split over a mesh are not copied: there is no room for three of them.
        """
        current = weights.read(self._names)
        if all(live_array(value) is None for value in current.values()):
            self._values = {name: weights.own(name, value) for name, value in (self._values or current).items()}

    def average_model(self, module: torch.nn.Module, **options: Any) -> AveragedModel:
        """A copy of ``module`` with the averages, in torch's wrapper; ``options`` are that one's."""
        averages = {**self.tensors()}
        memo: dict[int, Any] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            value = averages.get(name, tensor.detach())
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            memo[id(tensor)] = torch.nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        model = AveragedModel(copy.deepcopy(module, memo), **options)
        model.n_averaged.fill_(self.count)
        return model

    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages as CPU tensors of the weights' shapes and dtypes; from the mesh they are fetched when they are read."""
        return {name: _as_tensor(value, self._dtypes[name]) for name, value in self._values.items()}

    def _on(self, weights: CurrentWeights) -> dict[str, Any]:
        """The averages where ``weights`` are: a run may fall back from the mesh to the host, and the next one begins there."""
        on_mesh = isinstance(weights, WeightsOnMesh)
        if all(isinstance(value, jax.Array) == on_mesh for value in self._values.values()):
            return self._values
        return {name: weights.own(name, value) for name, value in self._values.items()}


class WeightsOnHost:
    """Weights of a module that is trained eagerly."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self._tensors[name].detach() for name in names}

    def exchange(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Overwrite weights (name → tensor of the weight's shape), and return copies of their old values."""
        before = {name: self._tensors[name].detach().clone() for name in values}
        for name, value in values.items():
            self._tensors[name].detach().copy_(value)
        return before

    def own(self, name: str, value: Any) -> torch.Tensor:
        """A copy of ``value`` in memory of its own, in the dtype of the weight ``name``."""
        if isinstance(value, jax.Array):
            return to_torch(value, self._tensors[name].dtype)
        return value.detach().to(self._tensors[name].dtype).clone()

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def average(
        self, rule: AveragingRule, averaged: dict[str, torch.Tensor], current: dict[str, torch.Tensor], count: int
    ) -> dict[str, torch.Tensor]:
        rule.apply(list(averaged.values()), [current[name] for name in averaged], torch.tensor(count))
        return averaged


class WeightsOnMesh:
    """Weights that a compiled run keeps on its mesh."""

    def __init__(self, model: ModelState) -> None:
        self._model = model
        self._tensors = {**model.params, **model.buffers}

    def read(self, names: Sequence[str]) -> dict[str, jax.Array]:
        self._model.push_writes()
        return {name: self._model.array(name) for name in names}

    def exchange(self, values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Put arrays in place of the weights, and return the old arrays; nothing is copied."""
        before = self.read(list(values))
        state = self._model.state
        params = {name: values.get(name, value) for name, value in state.params.items()}
        buffers = {name: values.get(name, value) for name, value in state.buffers.items()}
        self._model.advance(dataclasses.replace(state, params=params, buffers=buffers))
        return before

    def own(self, name: str, value: Any) -> jax.Array:
        """A copy of ``value`` that no step will donate, in the dtype of the weight ``name`` and split like it."""
        if isinstance(value, jax.Array):
            return jnp.copy(value)
        current = self._model.array(name)
        return place(np.array(as_numpy(value.detach())).astype(current.dtype), current.sharding)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def average(
        self, rule: AveragingRule, averaged: dict[str, jax.Array], current: dict[str, jax.Array], count: int
    ) -> dict[str, jax.Array]:
        names = list(averaged)
        program = rule.program([self._tensors[name] for name in names], count)
        arrays = program([averaged[name] for name in names], [current[name] for name in names], np.int32(count))
        return dict(zip(names, arrays, strict=True))


_Program = Callable[[list[jax.Array], list[jax.Array], Any], list[jax.Array]]


class AveragingRule:
    """The averaging function as torch code, and as a program over a mesh.

    On the mesh the function is captured once, with ``num_averaged`` an input. A function that needs it as a number
    (``min(decay, (1 + n) / (10 + n))``, ``if n < 100``) is captured for each update and run op by op.

    Args:
        avg_fn: averages one tensor; default: equally weighted.
        multi_avg_fn: averages all tensors of one dtype.
    """

    def __init__(self, avg_fn: AveragingFunction | None = None, multi_avg_fn: MultiAveragingFunction | None = None) -> None:
        self._avg_fn = avg_fn or get_swa_avg_fn()
        self._multi_avg_fn = multi_avg_fn
        self._program: _Program | None = None
        self._needs_number = False

    @torch.no_grad()
    def apply(self, averaged: Sequence[torch.Tensor], current: Sequence[torch.Tensor], count: torch.Tensor) -> None:
        """Average in place. ``averaged`` and ``current`` are lists of equal shapes and dtypes, ``count`` is an int64 scalar."""
        if self._multi_avg_fn is None:
            for average, now in zip(averaged, current, strict=True):
                average.copy_(self._avg_fn(average, now, count))
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in averaged):
            chosen = [(average, now) for average, now in zip(averaged, current, strict=True) if average.dtype == dtype]
            self._multi_avg_fn([average for average, _ in chosen], [now for _, now in chosen], count)

    def program(self, tensors: Sequence[torch.Tensor], count: int) -> _Program:
        """``(averaged, current, count) -> averaged`` for arrays of the tensors' shapes and dtypes; ``averaged`` is donated."""
        if self._needs_number:
            return _program(self._captured(tensors, count))
        if self._program is None:
            try:
                self._program = _compiled(_program(self._captured(tensors, None)))
            except CaptureError:
                self._needs_number = True
                return self.program(tensors, count)
        return self._program

    def _captured(self, tensors: Sequence[torch.Tensor], constant: int | None) -> Capture:
        """The graph of :meth:`apply` for tensors of these shapes and dtypes; a given ``constant`` is baked in as the count."""

        def step(averaged: list[torch.Tensor], current: list[torch.Tensor], count: torch.Tensor) -> list[torch.Tensor]:
            self.apply(averaged, current, count if constant is None else torch.tensor(constant))
            return averaged

        return capture(step, _meta(tensors), _meta(tensors), torch.empty((), dtype=torch.int64, device="meta"))


def _program(captured: Capture) -> _Program:
    run = lower(captured)
    return lambda averaged, current, count: captured.unflatten(run([*averaged, *current, jnp.int32(count)], None))


def _compiled(program: _Program) -> _Program:
    """``program`` compiled; the averages keep their shardings."""
    compiled: dict[Any, _Program] = {}

    def run(averaged: list[jax.Array], current: list[jax.Array], count: Any) -> list[jax.Array]:
        shardings = tuple(array.sharding for array in averaged)
        if shardings not in compiled:
            # without compiler_options: averages, element by element
            compiled[shardings] = jax.jit(program, donate_argnums=0, out_shardings=list(shardings))
        return compiled[shardings](averaged, current, count)

    return run


def _meta(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without values of the same shapes and dtypes."""
    return [torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta") for tensor in tensors]


def _as_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return array_tensor(value, dtype) if isinstance(value, jax.Array) else value.clone()
