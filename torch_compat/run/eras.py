"""Eras 1.3 to 1.6 of Lightning as a run meets them: base classes, removed hooks, and plugins of their own.

:mod:`torch_compat.legacy` registers itself here as it is imported, which every import of a name of ``pytorch_lightning`` that
differs from today's does. What is of today asks this registry, and never imports that package: a script of 2.x does without it.
One thing of 1.3 is made from a class of today, an ``Accelerator`` with plugins; for it the package's entry point is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from torch_compat.run import hook_calls
from torch_compat.run.hook_context import HookContext
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_deprecation

if TYPE_CHECKING:
    from torch_compat.strategies.strategy import Strategy

GROUP = "torch_compat.eras"
"""Entry points whose import registers an era."""


@dataclass(frozen=True)
class Era:
    """Earlier releases with an API of their own.

    Attributes:
        bases: base classes of modules and callbacks; their methods are defaults, not overrides.
        module: the base class of modules.
        training_type: the base class of plugins that take the place of a strategy.
        strategy: the class of the strategies that call such plugins.
        strategy_of: the strategy that calls such a plugin, or an Accelerator that holds one.
        hooks: of a Trainer, a run's removed hooks, or None where no object of the run is of this era.
        init_hooks: of a Trainer, calls the hooks around the Trainer's constructor.
    """

    bases: tuple[type, ...]
    module: type
    training_type: type
    strategy: type
    strategy_of: Callable[[Any], Strategy]
    hooks: Callable[[Any], Any]
    init_hooks: Callable[[Any], None]


_known: list[Era] = []


def register(era: Era) -> None:
    """Make an era known to all runs from now on."""
    hook_calls.add_defaults(*era.bases)
    _known.append(era)


def is_of_earlier_era(module: Any) -> bool:
    """Whether a module's class comes through ``pytorch_lightning``."""
    return any(isinstance(module, era.module) for era in _known)


def training_types() -> tuple[type, ...]:
    """The base classes of plugins that take the place of a strategy."""
    return tuple(era.training_type for era in _known)


def strategies() -> tuple[type, ...]:
    """The classes of strategies that call such plugins."""
    return tuple(era.strategy for era in _known)


def strategy_of_plugins(given: Any) -> Strategy:
    """The strategy for a plugin of :func:`training_types`, or for an Accelerator with plugins.

    Raises:
        TypeError: a plugin of another era, by name.
        MisconfigurationException: no era is installed.
    """
    if not _known:
        for entry in entry_points(group=GROUP):
            entry.load()
    for era in _known:
        return era.strategy_of(given)
    raise MisconfigurationException(
        f"{type(given).__name__} has plugins of Lightning 1.3 to 1.5, which are found by the entry points of the installed "
        "package: install xlatrain (`pip install .` in its folder), or import pytorch_lightning first"
    )


def hooks_of_run(trainer: HookContext) -> Any:
    """The removed hooks of this run (``torch_compat.legacy.era_hooks.EraHooks``); None where nothing is of an earlier era."""
    return next((hooks for era in _known if (hooks := era.hooks(trainer)) is not None), None)


def init_hooks(trainer: HookContext) -> None:
    """Call ``on_init_start`` and ``on_init_end`` of callbacks of earlier eras."""
    for era in _known:
        era.init_hooks(trainer)


def refuse_removed_hooks(module: Any, fn: str) -> None:
    """Refuse removed hooks in modules that come through ``lightning``, like Lightning 2.x.

    Raises:
        NotImplementedError: names the hook and what replaces it.
        RuntimeError: ``configure_model`` under its old name and its new one.
    """
    if is_of_earlier_era(module):
        return
    kind = type(module).__name__
    if hook_calls.is_overridden("configure_sharded_model", module):
        if hook_calls.is_overridden("configure_model", module):
            raise RuntimeError(
                f"Both `{kind}.configure_model` and `{kind}.configure_sharded_model` are overridden: the second is the old name "
                "of the first. Keep `configure_model`."
            )
        rank_zero_deprecation(
            f"You have overridden `{kind}.configure_sharded_model` which is deprecated. Please override the `configure_model` "
            "hook instead, which makes the model on its device and in its data type right away."
        )
    names = {"fit": ("training", "validation"), "validate": ("validation",), "test": ("test",)}.get(fn, ())
    for name in (f"{stage}_epoch_end" for stage in names):
        if callable(getattr(module, name, None)):
            instead = f"on_{name.replace('training', 'train')}"
            raise NotImplementedError(
                f"Support for `{name}` has been removed in v2.0.0. `{type(module).__name__}` implements this method. "
                f"In 2.x `{instead}` is called there; let the step append its outputs to a list of the module. "
                "Import it through `pytorch_lightning` to keep the hooks of 1.x."
            )
