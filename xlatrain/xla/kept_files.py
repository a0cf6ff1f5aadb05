"""Files of our own beside JAX's programs: what a process has made and the next one needs again, by a key of all it is made from.

A file has its contents after a digest of them, and comes to its name whole: of a damaged one, or one that another process is
writing, nothing is taken. They are in our own folder alone (:func:`~xlatrain.xla.compilation_cache.enable`), and count towards
its bound; where JAX's settings name another, nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

import jax

_PACKAGES = ("xlatrain", "torch_compat")
_DIGEST = hashlib.sha256
_folder: Path | None = None


def use(folder: Path | None) -> None:
    """Keep files in ``folder`` from now on; None: keep none."""
    global _folder
    _folder = folder


def are_kept() -> bool:
    """Whether files are kept at all."""
    return _folder is not None


def key_of(*parts: str) -> str:
    """The key of what is made from ``parts``, our own sources, and the versions of Python and JAX."""
    found = _of_process().copy()
    _add(found, parts)
    return found.hexdigest()


def _add(digest: hashlib._Hash, parts: Iterable[str]) -> None:
    for part in parts:
        digest.update(f"{len(part)} {part}".encode(errors="surrogatepass"))


def read(kind: str, key: str) -> bytes | None:
    """The contents of a file that is whole; None where there is none."""
    if _folder is None:
        return None
    path = _path(_folder, kind, key)
    try:
        found = path.read_bytes()
    except OSError:
        return None
    size = _DIGEST().digest_size
    if _DIGEST(found[size:]).digest() == found[:size]:
        return found[size:]
    warn_of_damage(path, "it is cut off or changed")
    return None


def write(kind: str, key: str, contents: bytes) -> None:
    """Keep ``contents``, which other processes may be doing, too; where that is not possible, nothing happens."""
    if _folder is None:
        return
    with contextlib.suppress(OSError):
        made = _folder / f".{os.getpid()}-{threading.get_ident()}-{key}"
        try:
            made.write_bytes(_DIGEST(contents).digest() + contents)
            os.replace(made, _path(_folder, kind, key))
        except BaseException:
            made.unlink(missing_ok=True)
            raise


def forget(kind: str, key: str, reason: str) -> None:
    """Let go of a file whose contents are of no use; ``reason`` is told."""
    if _folder is not None:
        warn_of_damage(_path(_folder, kind, key), reason)


def warn_of_damage(path: Path, reason: str) -> None:
    """Warn of a file that cannot be used, and delete it."""
    warnings.warn(f"{path} is of no use, and is made anew: {reason}", stacklevel=2)
    with contextlib.suppress(OSError):
        path.unlink()


def _path(folder: Path, kind: str, key: str) -> Path:
    return folder / f"xlatrain-{kind}-{key}"


@functools.cache
def _of_process() -> hashlib._Hash:
    """The digest of the versions and sources that all that is kept depends on."""
    python = f"{sys.version} {sys.implementation.cache_tag} {sys.flags.optimize}"
    found = _DIGEST()
    _add(found, (python, jax.__version__, importlib.metadata.version("jaxlib"), *_sources()))
    return found


def _sources() -> list[str]:
    """The files of our packages, with when they were last changed."""
    found = []
    for name in _PACKAGES:
        module = sys.modules.get(name)
        for root in getattr(module, "__path__", ()):
            for folder, folders, files in os.walk(root):
                folders.sort()
                for file in sorted(files):
                    if file.endswith(".py"):
                        stat = os.stat(os.path.join(folder, file))
                        found.append(f"{folder}/{file} {stat.st_size} {stat.st_mtime_ns}")
    return found
