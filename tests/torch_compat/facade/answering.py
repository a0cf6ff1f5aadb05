"""The shared part of this folder's scripts: small calls of Lightning's public names, whose answers are written as JSON.

Everything here is ordinary Lightning code: it runs unchanged under stock Lightning and under ``python -m torch_compat``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_OF_LIBRARIES = ("FutureWarning", "JsonargparseDeprecationWarning")
"""Warnings about how a package uses another one: no part of an answer."""

QUESTIONS: dict[str, Callable[[], Any]] = {}
_PACKAGES = re.compile(r"\b(lightning\.pytorch|lightning\.fabric|pytorch_lightning|torch_compat(\.fabric)?)\.")
_PLACES = re.compile(r"/[\w./-]*?/(?=asked\b)|0x[0-9a-f]+|\b\d\.\d+(e-?\d+)?(?= ?s(econds)?\b)")


def ask(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a question; its name is the function's."""
    assert function.__name__ not in QUESTIONS, function.__name__
    QUESTIONS[function.__name__] = function
    return function


def ask_each(**questions: Callable[[], Any]) -> None:
    """Register several questions, one lambda each."""
    for name, function in questions.items():
        assert name not in QUESTIONS, name
        QUESTIONS[name] = function


def attempt(function: Callable[[], Any]) -> Any:
    """The result of a call, or the error that it raises: for a question that makes several calls."""
    try:
        return show(function())
    except Exception as error:
        return {"raises": kinds(error), "message": plain(str(error))}


def kinds(error: BaseException) -> list[str]:
    """The names of an error's classes: what an ``except`` may name."""
    return [cls.__name__ for cls in type(error).__mro__ if cls not in (object, BaseException, Exception)]


def plain(text: str) -> str:
    """A text without what differs from run to run, and without package names."""
    return _PLACES.sub("", _PACKAGES.sub("", text))


def show(value: Any) -> Any:
    """``value`` as JSON, with its kinds: tensors with dtype and values, dataclasses with fields, other objects by class."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, enum.Enum)):
        return plain(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return repr(value) if value != value or abs(value) == float("inf") else float(f"{value:.4g}")
    if isinstance(value, torch.Tensor):
        values = value.detach().cpu()
        return {
            "tensor": str(values.dtype),
            "values": show(values.double().tolist() if values.is_floating_point() else values.tolist()),
        }
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return f"class {value.__name__}"
    if isinstance(value, dict):
        return {"kind": type(value).__name__, **{str(key): show(item) for key, item in value.items()}}
    if isinstance(value, set | frozenset):
        return {type(value).__name__: sorted(map(str, value))}
    if isinstance(value, list | tuple):
        shown = [show(item) for item in value]
        return shown if type(value) is list else {type(value).__name__: shown}
    if isinstance(value, Path):
        return plain(str(value))
    if dataclasses.is_dataclass(value):
        return {
            "kind": type(value).__name__,
            **{field.name: show(getattr(value, field.name)) for field in dataclasses.fields(value)},
        }
    return f"{type(value).__name__} object"


def answer(function: Callable[[], Any]) -> dict[str, Any]:
    """Value or error of a call, the warnings that it gives, what it prints, what it logs."""
    found: dict[str, Any] = {}
    printed, log = io.StringIO(), _Log()
    with warnings.catch_warnings(record=True) as given, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        log.attach()
        try:
            found["value"] = show(function())
        except (Exception, SystemExit) as error:
            found["raises"], found["message"] = kinds(error), plain(str(error))
        finally:
            log.detach()
    kept = [warning for warning in given if warning.category.__name__ not in _OF_LIBRARIES]
    found["warns"] = [[warning.category.__name__, plain(str(warning.message))] for warning in kept]
    found["prints"], found["logs"] = plain(printed.getvalue()), [plain(line) for line in log.lines]
    return {key: value for key, value in found.items() if value or key in ("value", "raises")}


class _Log(logging.Handler):
    """Collects what the two packages log, by whichever name."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def attach(self) -> None:
        logging.getLogger().addHandler(self)
        for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch_compat"):
            logging.getLogger(name).addHandler(self)

    def detach(self) -> None:
        logging.getLogger().removeHandler(self)
        for name in ("lightning", "lightning.pytorch", "lightning.fabric", "torch_compat"):
            logging.getLogger(name).removeHandler(self)


def main() -> None:
    """Answer the questions (those named, or all) and write ``{name: answer}`` to a file: ``script.py OUT [NAME…]``."""
    out, *names = sys.argv[1:]
    del sys.argv[1:]  # a LightningCLI would read them
    out = os.path.abspath(out)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        answers = {}
        for name in names or QUESTIONS:
            where = Path(folder, name, "asked")
            where.mkdir(parents=True)
            os.chdir(where)
            answers[name] = answer(QUESTIONS[name])
        os.chdir("/")
    Path(out).write_text(json.dumps(answers))
