"""Programs that outlive their process: found by what they are made from, before JAX traces anything.

JAX's own cache is looked up by StableHLO, which tracing and lowering make anew in each process: for a small GPT that takes three
times as long as loading the executable. A :class:`StoredProgram` has a file, by a key of its own, with the name of its code in
JAX's cache and all else that JAX knows of a compiled program. The code is not written again: an executable that came out of the
cache would lose functions on its way back.

What is not stored, and goes by JAX's cache alone: programs of several processes, which would have to agree; of other devices than
CPUs; such as call back to Python, or call a library by the name that this process has registered it under.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import platform
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache as jax_cache
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from xlatrain.xla import kept_files
from xlatrain.xla.told import OF_NO_PROGRAM, NotToldError, told_arguments, told_settings

_KIND = "program"
_CALLS = re.compile(r"stablehlo\.custom_call @([\w.$]+)")
_OF_XLA = ("mhlo.", "chlo.", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
"""Custom calls that the compiler resolves."""


class StoredProgram:
    """A jitted function whose first executable is found on disk, or kept there.

    Args:
        program: the jitted function.
        key: gives text of all that it was made from but arguments and settings; None where that cannot be said.
    """

    def __init__(self, program: Callable[..., Any], key: Callable[[], str | None]) -> None:
        self._program = program
        self._key: Callable[[], str | None] | None = key
        self._missing: str | None = None
        self._loaded: jax.stages.Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        if self._key is not None:
            self.prepare(*args)
        if self._loaded is not None:
            try:
                return self._loaded(*args)
            except (TypeError, ValueError):  # arguments of other forms: nothing has run yet
                self._loaded = None
        return self._program(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def find(self, *args: Any) -> bool:
        """Whether the executable for arguments like these was on disk. It is asked for once, and loaded."""
        if self._key is None:
            return self._loaded is not None
        make, self._key = self._key, None
        self._missing = key = _whole_key(make, args)
        if key is not None and (contents := kept_files.read(_KIND, key)) is not None:
            try:
                self._loaded = _load(contents, args)
            except Exception as error:
                kept_files.forget(_KIND, key, f"{type(error).__name__}: {str(error)[:200]}")
        return self._loaded is not None

    def prepare(self, *args: Any) -> jax.stages.Compiled:
        """The executable for arguments like these: loaded, or compiled and kept."""
        if self.find(*args):
            assert self._loaded is not None
            return self._loaded
        key, self._missing = self._missing, None
        lowered = self._program.lower(*args)  # pyright: ignore[reportFunctionMemberAccess]
        with _noting_places() as places:
            compiled = lowered.compile()
        if key is not None and len(places) == 1 and (contents := _contents(lowered, compiled, places[0])) is not None:
            kept_files.write(_KIND, key, contents)
        return compiled


def may_be_stored(mesh: jax.sharding.Mesh) -> bool:
    """Whether programs on ``mesh`` are looked for on disk: with a JAX whose cache has the functions that this takes, too."""
    on_cpus = all(one.platform == "cpu" for one in mesh.devices.flat)
    has_functions = hasattr(jax_cache, "get_cache_key") and hasattr(jax_cache, "get_executable_and_time")
    return kept_files.are_kept() and on_cpus and jax.process_count() == 1 and has_functions


def _whole_key(make: Callable[[], str | None], args: Any) -> str | None:
    try:
        text = make()
        return None if text is None else kept_files.key_of(text, told_arguments(args), _settings(), _machine())
    except NotToldError:
        return None


def _settings() -> str:
    """The settings by which JAX may trace, lower or compile something else."""
    config: Any = jax.config
    ours = {name: getattr(config, name, value) for name, value in config.values.items() if "cache" not in name}
    names = [name for name in os.environ if name.startswith(("XLA", "JAX_", "LIBTPU", "TF_")) and "CACHE" not in name]
    return told_settings({**ours, **{name: os.environ[name] for name in names if name not in OF_NO_PROGRAM}})


@functools.cache
def _machine() -> str:
    """The processors that code is made for, and the devices."""
    facts: list[str] = []
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else ():
        if line.startswith(("model name", "flags", "Features", "CPU part")) and line not in facts:
            facts.append(line)
    devices = [(one.id, one.platform, one.device_kind) for one in jax.devices()]
    return f"{platform.machine()} {facts} {devices} {os.cpu_count()} {jax.local_devices()[0].client.platform_version}"


def _contents(lowered: Any, compiled: jax.stages.Compiled, place: str) -> bytes | None:
    """All of an executable but its code, which JAX's cache has at ``place``; None where another process could not run it."""
    unloaded: Any = getattr(compiled._executable, "_unloaded_executable", None)
    if (
        unloaded is None
        or unloaded.host_callbacks
        or unloaded.keepalive
        or unloaded.ordered_effects
        or unloaded.unordered_effects
    ):
        return None
    if compiled._params.const_args or any(not name.startswith(_OF_XLA) for name in _CALLS.findall(lowered.as_text())):
        return None
    results = jax.tree.unflatten(compiled.out_tree, range(compiled.out_tree.num_leaves))
    file = io.BytesIO()
    try:
        _Pickler(file, place, [one.id for one in unloaded.device_list]).dump(
            (unloaded, jax.tree.leaves(compiled.args_info), results)
        )
    except (pickle.PicklingError, TypeError, AttributeError):
        return None  # the next process goes by JAX's own cache
    return file.getvalue()


def _load(contents: bytes, args: Any) -> jax.stages.Compiled | None:
    """The executable that :func:`_contents` tells of; None where JAX's cache does not have it any more."""
    try:
        unloaded, information, results = _Unpickler(io.BytesIO(contents)).load()
    except _GoneError:
        return None
    given = jax.tree.unflatten(jax.tree.structure((args, {})), information)
    return jax.stages.Compiled(unloaded.load(), [], given, jax.tree.structure(results), no_kwargs=True)


class _GoneError(Exception):
    """JAX's cache does not have an executable any more."""


class _Pickler(pickle.Pickler):
    """Writes names in place of code, devices and their client.

    Args:
        place: the name of the code.
        devices: on which it runs, by their ids.
    """

    def __init__(self, file: io.BytesIO, place: str, devices: list[int]) -> None:
        super().__init__(file)
        self._code = ("code", place, devices)

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, jax.Device):
            return ("device", obj.id)
        name = type(obj).__name__
        return self._code if name == "LoadedExecutable" else ("client",) if name == "Client" else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        client = jax.local_devices(backend="cpu")[0].client
        if pid[0] == "client":
            return client
        by_id = {one.id: one for one in client.devices()}
        if pid[0] == "device":
            return by_id[pid[1]]
        devices = xla_client.DeviceList(tuple(by_id[number] for number in pid[2]))
        found, _ = jax_cache.get_executable_and_time(pid[1], None, client, devices)
        if found is None:
            raise _GoneError
        return found


@contextlib.contextmanager
def _noting_places() -> Iterator[list[str]]:
    """The names under which JAX's cache looks for what this thread compiles in the block."""
    thread, found, original = threading.get_ident(), [], jax_cache.get_cache_key

    def get_cache_key(*args: Any, **kwargs: Any) -> str:
        key = original(*args, **kwargs)
        if threading.get_ident() == thread:
            found.append(key)
        return key

    jax_cache.get_cache_key = get_cache_key
    try:
        yield found
    finally:
        jax_cache.get_cache_key = original
