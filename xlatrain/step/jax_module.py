"""JaxModule: an ``nnx`` module with the steps, the optimizer and the hooks of a training run."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, ClassVar

import jax
from flax import nnx

from xlatrain.step.variables import Filter, StructureError


class JaxModule(nnx.Module):
    """An ``nnx`` module that a Trainer runs as it runs a ``LightningModule``.

    ::

        class Classifier(xlatrain.JaxModule):
            def __init__(self, rngs: nnx.Rngs) -> None:
                self.layer = nnx.Linear(64, 10, rngs=rngs)

            def training_step(self, batch, batch_idx):
                images, labels = batch
                loss = optax.softmax_cross_entropy_with_integer_labels(self.layer(images), labels).mean()
                self.log("loss", loss, prog_bar=True)
                return loss

            def configure_optimizers(self):
                return optax.adamw(1e-3)

    Steps are traced by ``jax.jit``: they change variables (batch statistics, random streams), log, and change nothing else.
    Outside of them everything that a LightningModule has is called if it is defined here: ``setup``, ``configure_model``,
    ``train_dataloader``, ``on_fit_start`` to ``on_train_batch_end``, ``on_save_checkpoint``. In hooks the variables have their
    present values, and what a hook writes into them counts.

    Attributes:
        trainable: which variables the optimizer updates, as an nnx filter; all others are buffers.
        automatic_optimization: always True: the update is the optimizer's.
    """

    trainable: ClassVar[Filter] = nnx.Param
    automatic_optimization: ClassVar[bool] = True

    def configure_optimizers(self) -> Any:
        """The ``optax`` transformation of all parameters, with its schedules in it; None trains nothing."""
        return None

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value under a name.

        Args:
            name: the key.
            value: a number or an array with one element.
            **options: those of ``LightningModule.log``: ``prog_bar``, ``on_step``, ``on_epoch``, ``reduce_fx``, ….

        Raises:
            RuntimeError: no Trainer runs this module.
        """
        step = _STEP.get()
        if step is not None:
            step.logged.append((name, value, options))
            return
        host = host_of(self)
        if host is None:
            raise RuntimeError(
                f"{type(self).__name__}.log({name!r}) outside of a run: `trainer.fit(module)` and its like have one"
            )
        host.log(name, float(value) if isinstance(value, jax.Array) else value, **options)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """:meth:`log` for every entry."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    @property
    def trainer(self) -> Any:
        """The Trainer that runs this module.

        Raises:
            RuntimeError: there is none; a step asks, whose program would have one value of it for ever.
        """
        if _STEP.get() is not None:
            raise RuntimeError(
                f"{_caller()}\n  self.trainer is of the host, and a step is traced once: use self.global_step, "
                "self.current_epoch, batch_idx, or a hook"
            )
        host = host_of(self)
        if host is None:
            raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`")
        return host.trainer

    @property
    def current_epoch(self) -> Any:
        """The current epoch; in a step an int32 scalar."""
        return self._counter("current_epoch")

    @property
    def global_step(self) -> Any:
        """The optimizer steps taken; in a step an int32 scalar."""
        return self._counter("global_step")

    def _counter(self, name: str) -> Any:
        step = _STEP.get()
        if step is not None:
            return step.counter(name)
        host = host_of(self)
        return 0 if host is None else getattr(host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _STEP.get() is not None and not isinstance(value, nnx.Variable):
            raise StructureError(
                f"{_caller()}\n  assigns self.{name}, a {type(value).__name__}, in a step: a step is traced, and runs without "
                "its Python from then on.\n  Fix: make it a variable in __init__ (nnx.Variable(…)) and write self."
                f"{name}[...] = …, log it, return it, or assign it in a hook"
            )
        super().__setattr__(name, value)


class StepTrace:
    """A step while it is traced.

    Args:
        counters: the counters of the loop that are inputs of the step.

    Attributes:
        logged: name, value and options of what it logged.
    """

    def __init__(self, counters: Mapping[str, Any]) -> None:
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []
        self._counters = counters

    def counter(self, name: str) -> Any:
        """The counter ``name`` as a scalar.

        Raises:
            CounterWanted: it is no input; the step is to be traced again with it.
        """
        if name not in self._counters:
            raise CounterWanted(name)
        return self._counters[name]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The context of the user's step."""
        token = _STEP.set(self)
        try:
            yield
        finally:
            _STEP.reset(token)


class CounterWanted(BaseException):  # through the user's step, whose handlers of Exception are not for it
    """A step asks for a counter that is not among its inputs."""


_STEP: ContextVar[StepTrace | None] = ContextVar("xlatrain_jax_step", default=None)
_HOSTS: weakref.WeakKeyDictionary[JaxModule, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def host_of(module: JaxModule) -> Any:
    """The runner of the module, with ``log``, ``trainer`` and the loop's counters; None while there is none."""
    found = _HOSTS.get(module)
    return None if found is None else found()


def attach(module: JaxModule, host: Any) -> None:
    """Let the module know what runs it; ``host`` is not kept alive."""
    _HOSTS[module] = weakref.ref(host)


def _caller() -> str:
    """``file:line`` of the code that called a method of :class:`JaxModule`."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
