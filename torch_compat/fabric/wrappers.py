"""Wrappers that ``setup`` returns: the user's module, optimizer and loader with Fabric in between.

API: ``lightning.fabric.wrappers``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer

from torch_compat.core.device_dtype import _DeviceDtypeModuleMixin
from torch_compat.core.optimizer import WrappedOptimizer
from torch_compat.fabric.dtypes import convert_inputs, convert_outputs
from torch_compat.utilities.data import _set_sampler_epoch
from torch_compat.utilities.device_transfer import move_data_to_device
from torch_compat.utilities.single_process import in_less_time
from xlatrain.mesh.lockstep import lockstep

if TYPE_CHECKING:
    from torch_compat.fabric.strategies.strategy import Strategy
    from torch_compat.step.eager.whole_batch import WholeBatches

_OWN = frozenset({"_forward_module", "_original_module", "_strategy", "_forward_methods", "_fabric_module_initialized"})

_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})

T_destination = TypeVar("T_destination", bound=dict[str, Any])


class _FabricModule(_DeviceDtypeModuleMixin):
    """A set-up module. Calling it converts dtypes, and runs it on the mesh.

    Every attribute that it does not have is the original module's.

    Args:
        forward_module: what the strategy's ``setup_module`` gave.
        strategy: of the Fabric.
        original_module: the user's; None: ``forward_module``.
    """

    def __init__(self, forward_module: Module, strategy: Strategy, original_module: Module | None = None) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module or forward_module
        self._strategy = strategy
        self._forward_methods: set[str] = set()
        self._fabric_module_initialized = True

    @property
    def module(self) -> Module:
        """The original module."""
        return self._original_module or self._forward_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Casts inputs to the precision, runs the module on the mesh, and casts the outputs to the default dtype."""
        return self._run("forward", self._forward_module, args, kwargs)

    def _run(self, method: str, called: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        precision = self._strategy.precision
        args, kwargs = convert_inputs(precision, (args, kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            with precision.forward_context():
                return called(*args, **kwargs)

        return convert_outputs(precision, self._strategy.call_module(self.module, method, run, args, kwargs))

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Calls of ``method`` on this object go the way of :meth:`forward`.

        Raises:
            TypeError: neither a method nor a name.
            ValueError: ``forward`` itself.
            AttributeError: the module has no such method.
        """
        if not isinstance(method, str | MethodType):
            raise TypeError(f"Expected a method or a string, but got: {type(method).__name__}")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise ValueError("You cannot mark the forward method itself as a forward method.")
        if not isinstance(getattr(self._original_module, name, None), MethodType):
            raise AttributeError(
                f"You marked '{name}' as a forward method, but `{type(self._original_module).__name__}.{name}` is not a method "
                "of that class."
            )
        self._forward_methods.add(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _FabricModule:
        """A copy of the module, set up like it: a target network, an average of weights."""
        made = memo[id(self)] = type(self).__new__(type(self))
        memo[id(self._strategy)] = self._strategy
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        self._strategy.precision.convert_module(made._forward_module)  # its parameters are; its layers are new ones
        self._strategy.add_copy(made._forward_module)
        return made

    def state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The original module's."""
        return self._original_module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, **kwargs: Any) -> Any:
        """The original module's."""
        return self._original_module.load_state_dict(state_dict, strict=strict, **kwargs)

    def __getattr__(self, item: str) -> Any:
        if item in _OWN:
            return super().__getattr__(item)
        original: Any = super().__getattr__("_original_module")
        if item in self.__dict__.get("_forward_methods", ()) or (item in _STEPS and self._is_step(original, item)):
            return self._redirected(item)
        try:
            return super().__getattr__(item)  # parameters and modules that were put on this object
        except AttributeError:
            found = getattr(original, item)  # the error names the original module
        if isinstance(found, MethodType) and item not in _STEPS and self._strategy.runs_beside_programs:
            return self._not_calling_modules(item, found)
        return found

    def _is_step(self, original: Module, name: str) -> bool:
        """Whether it is a step of a LightningModule, which counts as marked where several devices share it, as in stock."""
        automatic = getattr(original, "automatic_optimization", False)
        return automatic and self._strategy.runs_beside_programs and isinstance(getattr(original, name, None), MethodType)

    def _not_calling_modules(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, refused where it calls the module or a part of it: on this process alone, beside the other devices."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            own, called = {id(one) for one in self._original_module.modules()}, []
            handle = register_module_forward_hook(lambda module, *_: called.append(module) if id(module) in own else None)
            try:
                output = method(*args, **kwargs)
            finally:
                handle.remove()
            if called:
                raise RuntimeError(
                    f"You are calling the method `{type(self._original_module).__name__}.{name}()` from outside the model. It "
                    "calls the module, which would compute on this process alone: mark it as a forward method with "
                    f"`fabric_model.mark_forward_method({name!r})` after `fabric.setup()`."
                )
            return output

        return call

    def _redirected(self, name: str) -> Callable[..., Any]:
        method = getattr(self._original_module, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._run(name, lambda *args, **kwargs: getattr(self._original_module, name)(*args, **kwargs), args, kwargs)

        return call

    def __setattr__(self, item: str, value: Any) -> None:
        if not self.__dict__.get("_fabric_module_initialized", False) or item in _OWN:
            super().__setattr__(item, value)
            return
        original = self._original_module
        here, there = hasattr(type(self), item) or item in self.__dict__, hasattr(original, item)
        if there or not here:
            setattr(original, item, value)
        if here:
            super().__setattr__(item, value)


class _FabricOptimizer(WrappedOptimizer):
    """A set-up optimizer: an instance of its class too, and every attribute is the wrapped optimizer's own.

    Args:
        optimizer: the user's.
        strategy: of the Fabric.
        callbacks: what is told of each step.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, callbacks: list[Any] | None = None) -> None:
        super().__init__(optimizer, "Fabric")
        self._strategy = strategy
        self._callbacks = callbacks or []

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's ``state_dict()``, with the state on the mesh."""
        return self._strategy.get_optimizer_state(self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the optimizer a state, on the mesh if it is there."""
        self._strategy.load_optimizer_state_dict(self.optimizer, state_dict)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer; the callbacks' ``on_after_optimizer_step(strategy=…, optimizer=…)`` follow."""
        kwargs = {} if closure is None else {"closure": closure}
        output = self._strategy.optimizer_step(self._optimizer, **kwargs)
        for callback in self._callbacks:
            hook = getattr(callback, "on_after_optimizer_step", None)
            if callable(hook):
                hook(strategy=self._strategy, optimizer=self._optimizer)
        return output

    def __repr__(self) -> str:
        return type(self).__name__ + repr(self._optimizer).removeprefix(type(self._optimizer).__name__)


class _FabricDataLoader:
    """A set-up loader: this process's rows of the global batches, on the device. Attributes are the user's loader's.

    Args:
        dataloader: re-batched for the mesh.
        device: where batches go; None: they stay.
        whole: gives batches the rows of all processes, for eager steps on several; else None.
    """

    def __init__(self, dataloader: Any, device: torch.device | None = None, whole: WholeBatches | None = None) -> None:
        self.__dict__.update(dataloader.__dict__)
        self._dataloader = dataloader
        self._device = device
        self._whole = whole
        self._num_iter_calls = 0

    @property
    def device(self) -> torch.device | None:
        """The device that batches go to."""
        return self._device

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        _set_sampler_epoch(self._dataloader, self._num_iter_calls)
        self._num_iter_calls += 1
        batches = lockstep(in_less_time(iter(self._dataloader)), "a data loader of setup_dataloaders")
        if self._whole is not None:
            batches = map(self._whole.gather, self._whole.loaded(batches))
        for batch in batches:
            yield batch if self._device is None else move_data_to_device(batch, self._device)


def unwrap(wrapped: Any) -> Any:
    """The user's module, optimizer or loader; anything else as it is. ``torch.compile``d modules come without their compiler."""
    if isinstance(wrapped, _FabricModule):
        return unwrap(wrapped._original_module)
    if isinstance(wrapped, _FabricOptimizer):
        return wrapped.optimizer
    if isinstance(wrapped, _FabricDataLoader):
        return wrapped._dataloader
    inner = wrapped.__dict__.get("_modules", {}).get("_orig_mod") if isinstance(wrapped, Module) else None
    return wrapped if inner is None else inner


def unwrap_all(collection: Any) -> Any:
    """``collection`` with everything in it unwrapped."""
    kinds = (_FabricModule, _FabricOptimizer, _FabricDataLoader, Module)
    return apply_to_collection(collection, dtype=kinds, function=unwrap)


def is_wrapped(obj: object) -> bool:
    """Whether ``obj`` was set up by Fabric."""
    return isinstance(obj, _FabricModule | _FabricOptimizer | _FabricDataLoader)


_unwrap_objects = unwrap_all
