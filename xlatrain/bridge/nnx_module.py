"""An ``nnx`` module as an ``nn.Module``: its parameters are torch's, its call is an op (:mod:`xlatrain.bridge.jax_function`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax.sharding import PartitionSpec

from xlatrain.bridge.jax_function import CallsJax, JaxFunction, spec_of
from xlatrain.bridge.jax_value import jax_value
from xlatrain.bridge.lazy_init import is_deferred
from xlatrain.bridge.tensors.host import as_numpy, from_numpy
from xlatrain.bridge.tensors.live import live_array
from xlatrain.step.initial_value import InitialValue
from xlatrain.step.purity import check_pure
from xlatrain.step.variables import Filter, ModuleVariables


class NnxTensors(CallsJax):
    """The tensors of an ``nnx`` module: a parameter for each of its trainable variables, a buffer for each of the others.

    They lie in a tree of modules under the names that the variables have (``blocks.0.attn.kernel``), so that whatever follows
    names and modules of torch follows these. From the first use on they are what counts; :meth:`sync` brings their values to the
    ``nnx`` module.

    Subclasses call :meth:`hold` once torch's constructor has run.
    """

    def hold(self, module: nnx.Module, trainable: Filter = nnx.Param, initial: Mapping[str, InitialValue] | None = None) -> None:
        """Make the tensors of ``module``.

        Args:
            module: the ``nnx`` module.
            trainable: which variables are parameters, as an nnx filter.
            initial: the values of its variables, by name, where these have shapes only (:func:`trace_init`).
        """
        held = _HELD[self] = _Held(module, trainable)
        params, buffers = self.variables.params, self.variables.buffers
        values = {} if initial else held.present()

        def tensor(name: str) -> torch.Tensor:
            if not initial:
                return self.tensor_for(values[name])
            found, kept = jax_value(initial[name])
            held.initial.append(kept)
            return found

        for name in params:
            owner, last = self._owner(name)
            owner.register_parameter(last, torch.nn.Parameter(tensor(name)))
        for name in buffers:
            owner, last = self._owner(name)
            owner.register_buffer(last, tensor(name))

    def tensor_for(self, array: Any) -> torch.Tensor:
        """A tensor with an array's values: a copy on the host."""
        return _tensor(array)

    def _owner(self, name: str) -> tuple[torch.nn.Module, str]:
        """The module that has the tensor ``name``, made where there is none yet, and the tensor's name in it."""
        *path, last = name.split(".")
        owner: torch.nn.Module = self
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]  # pyright: ignore[reportAssignmentType]
        return owner, last

    @property
    def variables(self) -> ModuleVariables:
        """The names and the structure of the ``nnx`` module, as they were when :attr:`version` was asked for last."""
        return _HELD[self].variables

    @property
    def version(self) -> int:
        """A number that changes with the plain attributes of the ``nnx`` module, which a program has as constants.

        Raises:
            ValueError: there are other variables than before.
        """
        held = _HELD[self]
        if not held.variables.unchanged():
            held.renew()
        return held.version

    def annotations(self) -> dict[str, PartitionSpec]:
        """The shardings of ``nnx.with_partitioning``, by name."""
        return self.variables.annotations()

    def sync(self) -> nnx.Module:
        """The ``nnx`` module with the present values."""
        held = _HELD[self]
        variables = held.variables
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name not in variables.params and name not in variables.buffers:
                continue
            if (array := live_array(tensor)) is not None or not is_deferred(tensor):
                variables.write(name, _array(tensor) if array is None else array)
                held.synced[name] = variables.variable(name).get_raw_value()
        return variables.module

    def written(self) -> dict[str, Any]:
        """The arrays, by name, of variables that were written since :meth:`sync`."""
        held = _HELD[self]
        variables = held.variables
        names = (*variables.params, *variables.buffers)
        if all(variables.variable(name).get_raw_value() is held.synced.get(name) for name in names):
            return {}
        return {name: array for name, array in held.present().items() if held.is_new(name)}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a variable: a parameter, a buffer, or what stands for it while a step is captured."""
        return getattr(*self._owner(name))

    def prepare(self, key: Hashable, function: ModuleFunction, specs: Sequence[jax.ShapeDtypeStruct]) -> _OnArrays:
        """Trace ``function``, for arrays of these shapes, if it is new; see :meth:`call`. Torch has no part in it.

        Raises:
            ImpureFunctionError, StructureError: it depends on the host, or changes more than variables.
        """
        key = (key, self.training, self.version, tuple((one.shape, one.dtype) for one in specs))
        held = _HELD[self]
        if key not in held.functions:
            made = _OnArrays(held.variables, function, self.training)
            own = [spec_of(self.tensor(name)) for name in (*held.variables.params, *held.variables.buffers)]
            check_pure(made.function.function, [*own, *specs], type(held.variables.module).__name__)
            held.functions[key] = made
        return held.functions[key]

    def call(self, key: Hashable, function: ModuleFunction, tensors: Sequence[torch.Tensor]) -> Called:
        """Call a pure function of the module and of arrays, and take over the buffers that it changes.

        Args:
            key: the same for functions that do the same.
            function: traced where its key, or the module's plain attributes, are new.
            tensors: for the arrays.
        """
        found = self.prepare(key, function, list(map(spec_of, tensors)))
        variables = self.variables
        buffers = [self.tensor(name) for name in variables.buffers]
        params = [self.tensor(name) for name in variables.params]
        results, auxiliary = found.function(*params, *buffers, *tensors)
        for index, value in zip(found.changed, auxiliary[len(auxiliary) - len(found.changed) :], strict=True):
            buffers[index].copy_(value)
        return Called(results, auxiliary[: len(auxiliary) - len(found.changed)], found.note)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call.

        Raises:
            TypeError: an argument is neither a tensor nor a constant that can be compared.
        """
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)

        def function(module: Any, arrays: Sequence[Any]) -> Returned:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(structure, [next(given) if one is _TENSOR else one[1] for one in places])
            found, note = jax.tree.flatten(module(*args, **kwargs))
            return Returned(found, [], note)

        try:
            found = self.call((structure, places), function, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            raise TypeError(
                f"an argument of {type(self.variables.module).__name__} is neither a tensor nor a hashable constant: "
                f"{sorted({type(leaf).__name__ for leaf in leaves})}; make arrays of it tensors"
            ) from error
        return jax.tree.unflatten(found.note, found.results)

    def __getstate__(self) -> dict[str, Any]:
        held = _HELD[self]
        return {**self.__dict__, _STATE: (held.variables.module, held.trainable)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module, trainable = state.pop(_STATE)
        super().__setstate__(state)
        _HELD[self] = _Held(module, trainable)


class NnxModule(NnxTensors):
    """An ``nnx`` module that torch calls: of tensors, in any nesting, it makes tensors.

    In a compiled step it is part of the program, and gradients flow through both sides. Dropout and batch norm follow
    ``training``: in training the module is called as it was made, else after its ``eval()``. Random streams and statistics are
    buffers.

    Args:
        module: any ``nnx.Module`` with a ``__call__``.
        trainable: which variables are parameters, as an nnx filter.
    """

    def __init__(self, module: nnx.Module, trainable: Filter = nnx.Param) -> None:
        super().__init__()
        self.hold(module, trainable)


_TENSOR = "a tensor"
_STATE = "nnx module and filter"


class _Held:
    """The ``nnx`` side of a module: kept beside it, since what lies in a module's attributes is taken for the user's.

    Attributes:
        functions: by key, see :meth:`NnxTensors.call`.
        initial: what tensors are made of that have no values yet.
        synced: the values that the module's variables were given last, by name.
    """

    def __init__(self, module: nnx.Module, trainable: Filter) -> None:
        self.variables = ModuleVariables(module, trainable)
        self.trainable = trainable
        self.functions: dict[Hashable, _OnArrays] = {}
        self.version = 0
        self.initial: list[InitialValue] = []
        self.synced: dict[str, Any] = {}

    def present(self) -> dict[str, Any]:
        """The arrays of all variables that have values, by name."""
        params, buffers = self.variables.values()
        return {**params, **buffers}

    def is_new(self, name: str) -> bool:
        """Whether a variable has a value, and another than it was given last."""
        value = self.variables.variable(name).get_raw_value()
        return not isinstance(value, jax.ShapeDtypeStruct) and value is not self.synced.get(name)

    def renew(self) -> None:
        """Take over changed plain attributes.

        Raises:
            ValueError: there are other variables than before.
        """
        old, new = self.variables, ModuleVariables(self.variables.module, self.trainable)
        for kind, before, now in (("parameters", old.params, new.params), ("buffers", old.buffers, new.buffers)):
            if before.keys() != now.keys():
                raise ValueError(
                    f"the {kind} of {type(new.module).__name__} are {sorted(now)} now, and were {sorted(before)} when the torch "
                    "module was made: make another one"
                )
        self.variables = new
        self.version += 1


_HELD: weakref.WeakKeyDictionary[NnxTensors, _Held] = weakref.WeakKeyDictionary()


def jax_module(module: nnx.Module, trainable: Filter = nnx.Param) -> NnxModule:
    """``module`` as an ``nn.Module``, for a LightningModule or any other torch module; see :class:`NnxModule`.

    Raises:
        TypeError: ``module`` is no ``nnx`` module.
    """
    if not isinstance(module, nnx.Module):
        found = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise TypeError(
            f"jax_module: module is {found}; expected an instance of nnx.Module. A Linen module becomes one by "
            "nnx.bridge.ToNNX(module, rngs=…) and nnx.bridge.lazy_init(…)"
        )
    return NnxModule(module, trainable)


class Returned(NamedTuple):
    """The returned values of a function of a module.

    Attributes:
        results: arrays through which gradients flow.
        auxiliary: other arrays.
        note: what else it found while it was traced, the same each time.
    """

    results: Sequence[Any]
    auxiliary: Sequence[Any]
    note: Any


class Called(NamedTuple):
    """:class:`Returned`, with tensors."""

    results: list[torch.Tensor]
    auxiliary: list[torch.Tensor]
    note: Any


ModuleFunction = Callable[[Any, Sequence[Any]], Returned]
"""``(module, arrays) -> Returned``; it may change the module's variables."""


class _OnArrays:
    """A function of a module as one of arrays: parameters, buffers, and its own arguments.

    Attributes:
        changed: the indices of the buffers that it changes: their new values are its last auxiliary results.
    """

    def __init__(self, variables: ModuleVariables, function: ModuleFunction, training: bool) -> None:
        self._variables = variables
        self._training = training
        self._function = function
        self.function = JaxFunction(self._run)
        self.changed: list[int] = []
        self.note: Any = None

    def _run(self, *arrays: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        params, buffers = len(self._variables.params), len(self._variables.buffers)
        module = self._variables.build(
            dict(zip(self._variables.params, arrays, strict=False)),
            dict(zip(self._variables.buffers, arrays[params : params + buffers], strict=True)),
        )
        if not self._training:
            module.eval()
        before = self._variables.seen(module)
        results, auxiliary, self.note = self._function(module, arrays[params + buffers :])
        new = self._variables.changed(module, before)
        self.changed = [index for index, name in enumerate(self._variables.buffers) if name in new]
        return results, [*auxiliary, *(new[name] for name in self._variables.buffers if name in new)]


def _tensor(value: Any) -> torch.Tensor:
    """A host tensor with a copy of an array's values."""
    return from_numpy(np.array(value))


def _array(tensor: torch.Tensor) -> jax.Array:
    """A host tensor's values as an array."""
    return jnp.asarray(as_numpy(tensor.detach().cpu()))
