"""Errors of the bridge, all of which name the user's file and line: the innermost that no installer wrote."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.metadata
import logging
import os
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_TYPED_IN = ("<stdin>", "<python-input", "<ipython-input")
_INFRASTRUCTURE = frozenset(
    {"torch", "torchgen", "functorch", "torchmetrics", "numpy", "jax", "jaxlib", "lightning", "lightning_utilities"}
    | {"pytorch_lightning", "optax", "flax", "pytest", "_pytest", "pluggy", "torch_compat", "xlatrain"}
)
"""Packages whose lines say nothing about a step."""
_OURS = tuple(f"{Path(__file__).resolve().parents[2] / name}{os.sep}" for name in ("xlatrain", "torch_compat"))


class BridgeError(RuntimeError):
    """A step that PyTorch could not capture or that JAX could not lower.

    Attributes:
        recoverable: whether everything that ran so far was right, so that an eager run may go on from here.
        stored: the tensor of an earlier step that it computes with, where that is the reason.
        storing: the changes of the run that would store it once more, of the caller's kind.
        carried: places where steps have put such tensors: as inputs they would be no reason any more.
        written: weak references to the host's tensors, of which it writes to the first in place, or to one of them, where that is
            the reason; those that the run itself made are gone with it.
        once: whether the next step has no such reason.
        per_batch: whether it may be no reason any more where the step's Python runs for every batch.
    """

    recoverable = True
    stored: Any = None
    storing: Sequence[Any] = ()
    carried: tuple[Any, ...] = ()
    written: tuple[weakref.ref[Any], ...] = ()
    per_batch = False
    once = False


class CaptureError(BridgeError):
    """The step's Python cannot be captured: its control flow or a host read depends on the values of tensors."""


class WrongPlanError(ValueError):
    """A plan by which steps are to be compiled does not fit the module: an eager run, which needs none, is no answer."""


class LoweringError(BridgeError):
    """An op of the captured graph has no JAX lowering, or its lowering failed."""


class DtypeError(LoweringError, TypeError):
    """A torch dtype that JAX does not have."""


def let_go(error: BaseException) -> None:
    """Clear the frames of an error that nobody is shown: they hold what a run of the user's Python held, which may be in a cycle.

    Weak references of the user's would stay alive until garbage is collected.
    """
    for told in chain_of(error):
        traceback.clear_frames(told.__traceback__)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """``error`` and the exceptions that led to it, each once."""
    waiting: list[BaseException | None] = [error]
    known: set[int] = set()
    while waiting:
        told = waiting.pop()
        if told is not None and id(told) not in known:
            known.add(id(told))
            yield told
            waiting += [told.__cause__, told.__context__]


@functools.cache  # a capture asks thousands of times: for each word that torch itself logs
def is_user_file(filename: str) -> bool:
    """True for source files that belong neither to Python, nor to an installed package, nor to xlatrain; or typed in."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = Path(filename).resolve()
    return not str(path).startswith(_OURS) and not is_installed(path)


def user_line(frames: traceback.StackSummary) -> str | None:
    """``file:line: source`` of the innermost frame that is the user's own code.

    Where a library's step runs (its module was called from here, not by code of the user's) the line is the library's, and the
    user's line that led there follows.
    """
    user, library = _innermost(frames, is_user_file), _innermost(frames, is_library_file)
    if library is not None and any(frame.filename.startswith(_OURS) for frame in frames[0 if user is None else user : library]):
        led = "" if user is None else f" (which {_place(frames[user])} led to)"
        return f"{_place(frames[library])}{led}"
    return None if user is None else _place(frames[user])


def _innermost(frames: traceback.StackSummary, wanted: Callable[[str], bool]) -> int | None:
    return next((at for at in reversed(range(len(frames))) if wanted(frames[at].filename)), None)


def _place(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"


@functools.cache
def is_library_file(filename: str) -> bool:
    """True for a file of an installed package that is none of those which every step goes through."""
    parts = Path(filename).parts
    below = next((parts[at + 1] for at in reversed(range(len(parts) - 1)) if parts[at] in _FOLDERS), None)
    return below is not None and below.removesuffix(".py") not in _INFRASTRUCTURE and not filename.startswith(_OURS)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Silence torch's log of an op that refuses its arguments: the op raises, and the same error is not logged before."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_is_no_failed_op)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_failed_op)


def _is_no_failed_op(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


_PACKAGES = tuple(f"{Path(sysconfig.get_paths()[kind]).resolve()}{os.sep}" for kind in ("purelib", "stdlib"))
_FOLDERS = {"site-packages", "dist-packages"}


def is_installed(path: Path) -> bool:
    """True for a resolved path of Python's own library, or of a package that was installed.

    A package may lie anywhere: with the user's own, with the system's below a virtual environment, in a folder on
    ``PYTHONPATH`` (``pip install --target``), where files of the user's may lie beside it: there its ``RECORD`` decides.
    """
    if str(path).startswith(_PACKAGES) or not _FOLDERS.isdisjoint(path.parts):
        return True
    searched = _resolved(tuple(sys.path))
    return any(path in _recorded(folder) for folder in path.parents if folder in searched)


@functools.lru_cache(maxsize=8)
def _resolved(searched: tuple[str, ...]) -> frozenset[Path]:
    return frozenset(Path(one).resolve() for one in searched)


@functools.cache
def _recorded(folder: Path) -> frozenset[Path]:
    """The files of packages whose ``.dist-info`` lies in ``folder``."""
    records = (one.read_text("RECORD") for one in importlib.metadata.distributions(path=[str(folder)]))
    return frozenset(folder / row[0] for record in records if record for row in csv.reader(record.splitlines()) if row)
