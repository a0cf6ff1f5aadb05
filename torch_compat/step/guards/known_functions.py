"""Functions of Python, torch and NumPy that are known by name: what they read, change, or leave alone."""

from __future__ import annotations

import enum
import gc
import operator
import os
import re
import sys
from typing import Any

import torch

VALUES = (bool, int, float, complex, str, bytes, type(None), range, slice, type(Ellipsis))
READS_FILES = frozenset(
    {"open", "exists", "isfile", "isdir", "islink", "getsize", "getmtime", "is_file", "is_dir", "read_text", "read_bytes", "stat"}
    | {"iterdir", "glob", "rglob", "listdir", "scandir", "walk"}
)
OF_FILES = frozenset({"io", "_io", "os", "posix", "genericpath", "posixpath", "ntpath", "nt", "pathlib", "glob"})
TAKES_DATA = frozenset({"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer"})
"""Functions of torch that take a list or an array."""
ASKS_NOTHING = frozenset(
    map(
        id,
        (id, type, callable, super, print, globals, locals, operator.is_, operator.is_not, sys._getframe),
    )
)
ASKS_ATTRIBUTE = {id(getattr): 1, id(hasattr): 1, id(object.__getattribute__): 1}
SETS_ATTRIBUTE = {id(setattr): 1, id(delattr): 1, id(object.__setattr__): 1, id(type.__setattr__): 1}
FILLS = frozenset(
    {"append", "appendleft", "extend", "insert", "add", "update", "__setitem__", "__delitem__", "remove", "discard", "clear"}
)
ONLY_FILLS = frozenset({"append", "appendleft", "add"})
CHANGES = frozenset({"pop", "popitem", "popleft", "setdefault", "sort", "reverse", "rotate", "move_to_end", "write", "truncate"})
OF_FRAMES = frozenset({"warnings", "inspect", "traceback", "logging", "contextlib", "contextvars", "unittest", "typing", "abc"})
_SETTINGS_OF = frozenset(
    {"sys", "gc", "signal", "_signal", "socket", "_socket", "locale", "_locale", "threading", "_thread", "warnings", "resource"}
    | {"faulthandler", "tracemalloc", "_tracemalloc", "calendar", "tempfile", "multiprocessing", "asyncio", "os", "posix"}
)
_SETTING = re.compile(r"(is|get|are|has)(_|[a-z])|active_count$|enumerate$|main_thread$")
_SEEDS = frozenset({"initial_seed", "geterr", "get_printoptions", "geterrcall", "getbufsize", "getstate"})
_NO_SETTING = frozenset({"getrandom", "get_ident", "get_native_id", "getrefcount", "getsizeof", "get_objects"})
AMBIENT = tuple(
    function
    for function in (
        *(torch.get_default_dtype, torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision),
        *(torch.get_num_threads, torch.is_inference_mode_enabled, torch.get_default_device, torch.get_deterministic_debug_mode),
        *(torch.is_deterministic_algorithms_warn_only_enabled, torch.is_anomaly_enabled, torch.get_num_interop_threads),
        *(sys.getrecursionlimit, os.getcwd, os.getpid, gc.get_freeze_count),
    )
)
IS_AMBIENT = frozenset(map(id, AMBIENT))


def is_setting(module: str, function: Any) -> bool:
    """Whether a function does nothing but to give a setting of the process."""
    name = getattr(function, "__name__", "")
    if name in _SEEDS:
        return module.partition(".")[0] in ("torch", "numpy")
    return module in _SETTINGS_OF and name not in _NO_SETTING and _SETTING.match(name) is not None


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like: by its own class, for a counter of the loop passes for a number."""
    return type(value) in VALUES or isinstance(value, enum.Enum | torch.dtype) or type(value) is tuple
