"""Classes that a file names: which of them may be made from it without the caller's consent.

A checkpoint holds the configuration of its module, class paths included, and jsonargparse imports and calls whatever a class path
says. So while hyperparameters of a file are parsed and made into objects, a name in it counts only for a class that was imported
before, and that is a subclass of one that an annotation of the module's constructor (or of a class made for it) names.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import typing
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jsonargparse import _common as jsonargparse_settings
from jsonargparse._parameter_resolvers import get_signature_parameters

from torch_compat.checkpoint.untrusted import UntrustedValueError
from torch_compat.stock_names.aliases import has_finder

_VERDICTS, _ENFORCED = "import_path_verdicts", "import_paths_enforced"


class FileClasses:
    """The rule for one file's names: which classes may be made from it, and which names were refused.

    Args:
        source: the file, for errors.
        root: the class, or function, whose arguments the file holds.
        given: what the caller gives beside the file; names in it are the caller's own.
    """

    def __init__(self, source: str, root: Callable[..., Any], given: Any = None) -> None:
        self._source = source
        self._own: set[str] = set()
        self._own_objects: list[Any] = []
        self._bases: set[type] = set()
        self._known: set[Any] = set()
        self._refused: dict[str, str] = {}
        self._take(given)
        self._learn(root)
        if isinstance(root, type):
            self._bases.add(root)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which jsonargparse imports by name only the classes that the file may name.

        Raises:
            UntrustedValueError: something else was named; whatever else was raised inside is a consequence.
        """
        settings = jsonargparse_settings.parsing_settings
        before = {name: settings[name] for name in (_VERDICTS, _ENFORCED)}
        settings.update({_VERDICTS: _Verdicts(self._allows), _ENFORCED: True})
        try:
            yield
        except (Exception, SystemExit):
            if not self._refused:
                raise
        finally:
            settings.update(before)
        if self._refused:
            self._refuse()

    def _refuse(self) -> typing.NoReturn:
        names = "; ".join(f"{name!r}, {why}" for name, why in self._refused.items())
        raise UntrustedValueError(
            f"the hyperparameters in {self._source} name {names}. A name in a file is imported and called only if it is a class "
            "that your script has imported, and a subclass of a class that an annotation of the module's constructor names. If "
            "you trust where the file comes from, pass weights_only=False; or annotate the parameter with the class; or allow "
            "the name alone with torch.serialization.add_safe_globals([...])"
        ) from None

    def _allows(self, path: str) -> bool:
        if path in self._own:
            return True
        found = _loaded(path)
        if found is not None:
            return any(found is one for one in self._own_objects) or self._approve(found, path)
        if importlib.util.find_spec(path.split(".")[0]) is not None:  # else it is a text with a dot in it
            self._refused[path] = "which was not imported"
        return False

    def _approve(self, found: Any, path: str) -> bool:
        listed = any(
            found is (entry[0] if isinstance(entry, tuple) else entry) for entry in torch.serialization.get_safe_globals()
        )
        if listed or (isinstance(found, type) and not self._bases.isdisjoint(found.__mro__)):
            self._learn(found)
            return True
        kind = "a class that no annotation names" if isinstance(found, type) else f"a {type(found).__name__}"
        self._refused[path] = f"which is {kind}"
        return False

    def _take(self, tree: Any) -> None:
        """Note the import paths and the objects that the script, or its configuration, names itself."""
        if isinstance(tree, str):
            self._own.add(tree)
            tree = _loaded(tree)
        if isinstance(tree, Mapping | Namespace):
            for value in vars(tree).values() if isinstance(tree, Namespace) else tree.values():
                self._take(value)
        elif isinstance(tree, list | tuple | set | frozenset):
            for value in tree:
                self._take(value)
        elif callable(tree):
            self._own_objects.append(tree)

    def _learn(self, function: Any) -> None:
        """Note the annotations and defaults of a constructor: they count from now on."""
        if function in self._known or not callable(function):
            return
        self._known.add(function)
        with contextlib.suppress(ValueError, TypeError):  # a builtin without signature
            for parameter in get_signature_parameters(function, logger=False):
                self._note(parameter.annotation)
                self._take(parameter.default)

    def _note(self, annotation: Any) -> None:
        """Note the classes in an annotation, whose subclasses a file may name; those of Python itself are too many."""
        named = typing.get_origin(annotation) or annotation
        if isinstance(named, type) and named not in self._bases and not _is_of_python(named):
            self._bases.add(named)
            if _is_written_as_dict(named):
                self._learn(named)
        parts = typing.get_args(annotation)
        if parts and isinstance(parts[0], list):  # of a Callable: what it returns is made, its arguments are not
            parts = parts[1:]
        for part in (*parts, *(getattr(annotation, name, None) for name in ("__value__", "__supertype__", "__bound__"))):
            if part is not None:
                self._note(part)


class _Verdicts(Mapping[str, bool]):
    """jsonargparse's table of what may be imported; it asks for the whole path first."""

    def __init__(self, allows: Callable[[str], bool]) -> None:
        self._allows = allows

    def __contains__(self, path: object) -> bool:
        return True

    def __getitem__(self, path: str) -> bool:
        return self._allows(path)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _is_of_python(cls: type) -> bool:
    return cls.__module__.split(".")[0] in sys.stdlib_module_names


def _is_written_as_dict(cls: type) -> bool:
    """Whether a configuration gives its fields without its name."""
    marks = ("__dataclass_fields__", "__attrs_attrs__", "model_fields")
    return issubclass(cls, dict | tuple) or any(hasattr(cls, mark) for mark in marks)


def _loaded(path: str) -> Any:
    """The object at an import path, in imported modules or in this package's own, imported on demand; None: there is none."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        if _is_of_library(module):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
        found = sys.modules.get(module)
        if found is None:
            continue
        look_up = getattr if _is_of_library(found.__name__) else inspect.getattr_static  # ours are imported when asked for
        for name in parts[length:]:
            found = look_up(found, name, None)
        return found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return None


def _is_of_library(module: str) -> bool:
    top = module.split(".")[0]
    return top == "torch_compat" or (has_finder() and top in ("lightning", "pytorch_lightning"))
