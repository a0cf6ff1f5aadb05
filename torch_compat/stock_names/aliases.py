"""Lightning's import names as aliases of our modules.

A finder in front of ``sys.meta_path`` answers for ``lightning``, ``pytorch_lightning`` and ``lightning_fabric`` and everything
below them, so that the real packages are never found, whether installed or not. An alias is the *same* module object as ours:
classes are identical through every spelling.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

from torch_compat.stock_names.removed_names import in_modules

ROOTS = ("lightning", "pytorch_lightning", "lightning_fabric")

# Longest prefix first. `pytorch_lightning` is an entry of its own, because names of earlier eras are accepted through it only.
_PREFIXES = (
    ("lightning.pytorch", "torch_compat"),
    ("lightning.fabric", "torch_compat.fabric"),
    ("lightning_fabric", "torch_compat.fabric"),
    ("pytorch_lightning", "torch_compat"),  # after _OLD_PATHS
    ("lightning", "torch_compat.stock_names.namespace"),
)

# Where our module for a name is called, or lies, differently.
_MOVED = {
    "torch_compat.core.mixins.hparams_mixin": "torch_compat.core.hparams",
    "torch_compat.fabric.utilities": "torch_compat.utilities",
    "torch_compat.fabric.utilities.apply_func": "torch_compat.utilities.device_transfer",
    "torch_compat.fabric.utilities.device_dtype_mixin": "torch_compat.core.device_dtype",
    **{
        f"torch_compat.fabric.strategies.{name}": "torch_compat.fabric.strategies.data_parallel"
        for name in ("ddp", "parallel", "single_device")
    },
    **{
        f"torch_compat.fabric.strategies.{name}": "torch_compat.fabric.strategies"
        for name in ("deepspeed", "dp", "registry", "single_xla", "xla", "xla_fsdp")
    },
    "torch_compat.fabric.strategies.launchers": "torch_compat.strategies.launchers",
    "torch_compat.strategies.deepspeed": "torch_compat.strategies",
    "torch_compat.strategies.single_xla": "torch_compat.strategies.xla",
    "torch_compat.accelerators.registry": "torch_compat.accelerators",
    "torch_compat.accelerators.xla": "torch_compat.accelerators.tpu",
    **{
        f"torch_compat.loops.{name}": "torch_compat.loops"
        for name in ("evaluation_loop", "fetchers", "fit_loop", "loop", "prediction_loop", "training_epoch_loop")
    },
    "torch_compat.loops.progress": "torch_compat.trainer.progress",
    "torch_compat.trainer.call": "torch_compat.run.hook_calls",
    "torch_compat.trainer.states": "torch_compat.run.states",
    "torch_compat.utilities.device_parser": "torch_compat.accelerators.device_parser",
    "torch_compat.utilities.migration": "torch_compat.trainer.migration",
    "torch_compat.utilities.testing": "torch_compat.accelerators.testing",
    "torch_compat.utilities.throughput": "torch_compat.accelerators.throughput",
    "torch_compat.utilities.upgrade_checkpoint": "torch_compat.trainer.upgrade_checkpoint",
    "torch_compat.trainer.configuration_validator": "torch_compat.trainer.connectors",
    "torch_compat.trainer.setup": "torch_compat.trainer.connectors",
    "torch_compat.utilities.model_summary.model_summary_deepspeed": "torch_compat.utilities.deepspeed",
    "torch_compat.fabric.strategies.fsdp": "torch_compat.fabric.strategies.sharded",
    "torch_compat.utilities.apply_func": "torch_compat.utilities.device_transfer",
    "torch_compat.fabric.accelerators": "torch_compat.accelerators",
    "torch_compat.fabric.plugins": "torch_compat.plugins",
    "torch_compat.plugins.io.checkpoint_plugin": "torch_compat.plugins.io.checkpoint_io",
    "torch_compat.plugins.io.torch_plugin": "torch_compat.plugins.io.torch_io",
    "torch_compat.plugins.io.xla": "torch_compat.plugins.io.xla_plugin",
    "torch_compat.plugins.io.wrapper": "torch_compat.plugins.io.async_plugin",
    **{
        f"torch_compat.plugins.precision.{name}": "torch_compat.plugins.precision"
        for name in (
            "amp",
            "bitsandbytes",
            "deepspeed",
            "double",
            "fsdp",
            "half",
            "precision",
            "transformer_engine",
            "utils",
            "xla",
        )
    },
    # Modules whose submodules they are themselves.
    **{
        f"{module}.{name}": module
        for module, names in {
            "torch_compat.loops.optimization": ("automatic", "closure", "manual"),
            "torch_compat.plugins.collectives": ("collective", "single_device", "torch_collective"),
            "torch_compat.strategies.launchers": ("launcher", "multiprocessing", "subprocess_script", "xla"),
            "torch_compat.trainer.connectors": (
                "accelerator_connector",
                "callback_connector",
                "checkpoint_connector",
                "data_connector",
                "logger_connector",
                "signal_connector",
            ),
            "torch_compat.trainer.connectors.logger_connector": ("fx_validator", "logger_connector", "result"),
            "torch_compat.trainer.migration": ("migration", "utils"),
        }.items()
        for name in names
    },
}


# Names of eras 1.3 to 1.6, accepted through `pytorch_lightning` only.
_TRAINING_TYPES = "torch_compat.legacy.training_type"
_OLD_PATHS = {
    "pytorch_lightning": "torch_compat.legacy.root",
    "pytorch_lightning.callbacks": "torch_compat.legacy.callbacks",
    "pytorch_lightning.callbacks.base": "torch_compat.legacy.callback",
    "pytorch_lightning.callbacks.callback": "torch_compat.legacy.callback",
    "pytorch_lightning.core": "torch_compat.legacy.core",
    "pytorch_lightning.core.hooks": "torch_compat.legacy.hooks",
    "pytorch_lightning.core.lightning": "torch_compat.legacy.module",
    "pytorch_lightning.core.module": "torch_compat.legacy.module",
    "pytorch_lightning.plugins": "torch_compat.legacy.plugins",
    "pytorch_lightning.plugins.base_plugin": _TRAINING_TYPES,
    "pytorch_lightning.plugins.training_type": _TRAINING_TYPES,
    **{
        f"pytorch_lightning.plugins.training_type.{name}": _TRAINING_TYPES
        for name in (
            "training_type_plugin",
            "ddp",
            "fully_sharded",
            "parallel",
            "sharded",
            "single_device",
            "single_tpu",
            "tpu_spawn",
            # those whose plugins are refused by name
            "ddp2",
            "ddp_spawn",
            "deepspeed",
            "dp",
            "horovod",
            "ipu",
            "rpc",
            "rpc_sequential",
            "sharded_spawn",
        )
    },
    "pytorch_lightning.plugins.precision": "torch_compat.legacy.precision_plugin",
    **{
        f"pytorch_lightning.plugins.precision.{name}": "torch_compat.legacy.precision_plugin"
        for name in ("precision_plugin", "native_amp", "double")
    },
    "pytorch_lightning.utilities.types": "torch_compat.legacy.types",
    "pytorch_lightning.utilities.distributed": "torch_compat.utilities.rank_zero",
    "pytorch_lightning.accelerators.gpu": "torch_compat.accelerators.cuda",
}


# Longest prefix first, as above: what `__name__` begins with in `pytorch_lightning` and in the modules that answer for it.
_ROOTS_OF_1_X = ("pytorch_lightning.", "torch_compat.legacy.root.", "torch_compat.legacy.", "torch_compat.")


def target_name(fullname: str) -> str | None:
    """The name of our module behind an import name, or None if it is none of Lightning's."""
    if fullname in _OLD_PATHS:
        return _OLD_PATHS[fullname]
    for prefix, ours in _PREFIXES:
        if fullname == prefix or fullname.startswith(prefix + "."):
            return _moved(ours + fullname[len(prefix) :])
    return None


def _below_pytorch_lightning(fullname: str) -> str | None:
    """``callbacks.X`` of ``pytorch_lightning.callbacks.X``, also as a member of our module, for which Python looks after that."""
    return next((fullname[len(root) :] for root in _ROOTS_OF_1_X if fullname.startswith(root)), None)


def _moved(name: str) -> str:
    head, tail = name, ""
    while head:
        if head in _MOVED:  # or a module of a package that moved as a whole
            found = _MOVED[head] + tail
            return found if found == name else _moved(found)
        head, dot, last = head.rpartition(".")
        tail = dot + last + tail
    return name


class AliasFinder(importlib.abc.MetaPathFinder):
    """Finds our module for one of Lightning's names; raises where there is none, so that no later finder is asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (below := _below_pytorch_lightning(fullname)) is not None and (removed := in_modules(below)) is not None:
            # Under another name than the one asked for: else `from package import name` would take it for "no submodule".
            raise ModuleNotFoundError(removed, name=f"pytorch_lightning.{below}")
        ours = target_name(fullname) or _MOVED.get(fullname)  # ``from lightning.pytorch.utilities import device_parser``
        if ours is None:
            return None
        if not _exists(ours):
            raise ModuleNotFoundError(
                f"`{fullname}` is not offered in this version of torch_compat (there is no module `{ours}`)."
                " The real package is not used in its place: remove the import, or run the script without torch_compat.",
                name=ours,
            )
        return importlib.machinery.ModuleSpec(fullname, AliasLoader(ours), is_package=True)


class AliasLoader(importlib.abc.Loader):
    """Puts our module into ``sys.modules`` under the alias."""

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        # The import system returns what is in `sys.modules` afterwards; our module's own `__spec__` stays untouched.
        sys.modules[module.__name__] = with_submodules(importlib.import_module(self.ours))


class Package(types.ModuleType):
    """A package of ours behind one of Lightning's names: its submodules are attributes without an import of each.

    Importing stock imports nearly all of its modules, so that scripts write ``L.fabric.strategies.fsdp.X`` after ``import
    lightning as L`` alone. Here a submodule is imported when it is asked for.
    """

    def __getattr__(self, name: str) -> Any:
        found = None if name.startswith("__") else _submodule(self.__name__, name)
        if found is None:
            if (own := vars(self).get("__getattr__")) is not None:
                return own(name)  # for its message
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self).setdefault(name, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        # Importing a submodule ends with this, so that packages in packages are of this class, too.
        super().__setattr__(name, with_submodules(value) if isinstance(value, types.ModuleType) else value)


def with_submodules(module: types.ModuleType) -> types.ModuleType:
    """The module; if it is a package of ours, it and those in it give their submodules as attributes from here on."""
    if type(module) is types.ModuleType and hasattr(module, "__path__") and module.__name__.partition(".")[0] == "torch_compat":
        module.__class__ = Package
        for value in list(vars(module).values()):
            if isinstance(value, types.ModuleType):
                with_submodules(value)
    return module


def _submodule(package: str, name: str) -> types.ModuleType | None:
    """The module that Lightning has as ``name`` in our ``package``, under any of the package's names; None: there is none."""
    for parent in (package, *(alias for alias, ours in _MOVED.items() if ours == package)):
        ours = _moved(f"{parent}.{name}")
        try:
            if _exists(ours):
                return with_submodules(importlib.import_module(ours))
        except ModuleNotFoundError:  # a name that Lightning had and removed, or a library that is not installed
            continue
    return None


def _exists(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        # A parent that does not exist, or is no package; but not a third-party module that the parent needs.
        if error.name is not None and name.startswith(error.name):
            return False
        raise


def refuse_real_packages() -> None:
    """Raises ``ImportError`` if one of the real packages is imported already."""
    for root in ROOTS:
        module = sys.modules.get(root)
        if module is None or module.__name__.partition(".")[0] == "torch_compat":
            continue
        raise ImportError(
            f"`{root}` was imported from {getattr(module, '__file__', None) or 'an unknown place'} before"
            " `torch_compat.install()`: classes of two packages would be mixed."
            " Call `torch_compat.install()` before anything imports Lightning (the first lines of the script),"
            " or run `python -m torch_compat script.py`."
        )


def has_finder() -> bool:
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


def add_finder() -> None:
    """Puts the finder in front, once."""
    if not has_finder():
        sys.meta_path.insert(0, AliasFinder())


def remove_finder() -> None:
    """Takes the finder away, and from ``sys.modules`` the names that it has answered for."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
        del sys.modules[name]
