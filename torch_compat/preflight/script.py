"""An unchanged script taken up to its ``trainer.fit``, on devices that are not here."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_compat.__main__ import run_module, run_script
from torch_compat.core.module import LightningModule
from torch_compat.install import installed
from torch_compat.preflight.errors import PreflightError
from torch_compat.trainer.devices import described_devices
from torch_compat.trainer.trainer import Trainer
from xlatrain.bridge.lazy_init import deferred_init
from xlatrain.bridge.patches import patched
from xlatrain.preflight import Topology
from xlatrain.preflight.report import Report


class _FitReached(BaseException):  # through the user's script, which may handle Exception
    """The script has reached ``fit``, and is left."""

    def __init__(self, report: Any) -> None:
        super().__init__("preflight ends here")
        self.report = report


def preflight_script(arguments: Sequence[str], topology: Topology, **options: Any) -> Report:
    """Run a script, or a module after ``-m``, up to its first ``trainer.fit``, and examine that.

    While it runs, Lightning's names are aliased as by ``python -m torch_compat``, and LightningModules are made without memory
    for their parameters.

    Args:
        arguments: the script's path (or ``-m`` and a module's name) and its arguments.
        options: of :func:`torch_compat.preflight.preflight`.

    Raises:
        PreflightError: the script ended without ``trainer.fit``, or ran something else first.
        Exception: whatever the script raises.
    """
    examine = functools.partial(_examine, topology=topology.name, num_slices=topology.num_slices, **options)
    with described_devices(topology.devices()):
        return until_fit(arguments, examine)


def until_fit(arguments: Sequence[str], examine: Callable[..., Any]) -> Any:
    """Run a script, or a module after ``-m``, up to its first ``trainer.fit``; gives what ``examine`` makes of that call.

    Args:
        examine: takes the Trainer and the arguments of ``fit``.

    Raises:
        PreflightError, Exception: as :func:`preflight_script`.
    """
    with installed(), main_kept(), _fit_replaced(examine), _modules_without_memory():
        try:
            if arguments[0] == "-m":
                run_module(arguments[1], list(arguments[2:]))
            else:
                run_script(arguments[0], list(arguments[1:]))
        except _FitReached as reached:
            return reached.report
    raise PreflightError(f"{' '.join(arguments)} ended without calling trainer.fit, so there is nothing to examine")


def _examine(
    trainer: Trainer,
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    weights_only: bool | None = None,
    **options: Any,
) -> Report:
    """Takes the arguments of ``fit``; those about a checkpoint are left alone, as its values change nothing of the programs."""
    return trainer.preflight(model, train_dataloaders, val_dataloaders, datamodule, **options)


@contextlib.contextmanager
def main_kept() -> Iterator[None]:
    """Puts back what a script replaces: children started later would else import that script as their ``__main__``."""
    main, argv, path = sys.modules["__main__"], sys.argv[:], sys.path[:]
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv[:], sys.path[:] = main, argv, path


@contextlib.contextmanager
def _fit_replaced(examine: Callable[..., Any]) -> Iterator[None]:
    """Let ``Trainer.fit`` examine and leave while the script runs; what would run something refuses."""

    def fit(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        raise _FitReached(examine(trainer, *args, **kwargs))

    def refuse(name: str) -> Callable[..., None]:
        def refused(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            raise PreflightError(
                f"the script calls trainer.{name} before trainer.fit; preflight runs nothing, so it cannot give the result. "
                "Let the script skip that, e.g. by an argument"
            )

        return refused

    replaced = {"fit": fit, **{name: refuse(name) for name in ("validate", "test", "predict")}}
    with patched((Trainer, name, function) for name, function in replaced.items()):
        yield


@contextlib.contextmanager
def _modules_without_memory() -> Iterator[None]:
    """LightningModules that are made inside get no memory for their parameters: the outermost constructor is deferred.

    The class's ``__init__`` is wrapped from ``__new__`` until it returns, so that ``save_hyperparameters`` finds the frames of
    the constructors next to each other.
    """
    original = LightningModule.__dict__.get("__new__")

    def make(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = object.__new__(cls) if original is None else original(cls, *args, **kwargs)
        own, constructor = cls.__dict__.get("__init__"), cls.__init__

        @functools.wraps(constructor)
        def deferred(self: Any, *args: Any, **kwargs: Any) -> None:
            if own is None:
                del cls.__init__  # pyright: ignore[reportAttributeAccessIssue]
            else:
                cls.__init__ = own
            with deferred_init(torchs_numbers=0):  # nobody looks at them
                constructor(self, *args, **kwargs)

        cls.__init__ = deferred
        return made

    LightningModule.__new__ = make  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        # Never deleted: CPython (bpo-5322) then takes object's __new__ with constructor arguments for a mistake.
        LightningModule.__new__ = _make if original is None else original  # pyright: ignore[reportAttributeAccessIssue]


def _make(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)
