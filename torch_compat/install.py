"""``torch_compat.install()``: lets unchanged scripts import Lightning and get torch_compat."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from multiprocessing import spawn

from torch_compat.stock_names.aliases import add_finder, has_finder, refuse_real_packages, remove_finder
from torch_compat.stock_names.child_processes import install_in_children


def install() -> None:
    """Aliases ``lightning`` (``.pytorch``, ``.fabric``), ``pytorch_lightning`` and ``lightning_fabric`` to torch_compat.

    From then on these imports give torch_compat's modules, in every spelling and order, in this process and in its spawn and
    forkserver children; the real packages are not used even if installed. What torch_compat does not offer is an ``ImportError``
    that says so. Calling it again does nothing.

    Raises:
        ImportError: one of the real packages was imported before.
    """
    refuse_real_packages()
    add_finder()
    install_in_children()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """:func:`install` for as long as the context lasts; what was installed before stays so.

    Raises:
        ImportError: one of the real packages was imported before.
    """
    if has_finder():
        yield
        return
    prepare = spawn.get_preparation_data
    install()
    try:
        yield
    finally:
        remove_finder()
        spawn.get_preparation_data = prepare


class _CallableModule(types.ModuleType):
    """A module that can be called: ``torch_compat.install()`` and ``from torch_compat.install import install`` both work."""

    def __call__(self) -> None:
        install()


sys.modules[__name__].__class__ = _CallableModule
