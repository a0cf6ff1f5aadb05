"""The manifest of a payload: which arrays and files are in it, length and digest of each stored file.

It is what makes damage a named error at open time instead of wrong numbers later.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
ARRAYS = "arrays"
FILES = "files"
_DIGESTS = "digests"
UNREADABLE = "cannot be read"
"""What is said of a file that is there, but no ordinary one, or closed to this process."""


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """A stored array.

    Attributes:
        shape: global shape.
        dtype: numpy's (or ml_dtypes') name, e.g. ``float32``, ``bfloat16``; of a typed random key, ``key<fry>`` as JAX prints it.
        key_impl: for an array of typed random keys, the generator's name as :func:`jax.random.key` takes it; else None.
    """

    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of one payload.

    Attributes:
        arrays: name → metadata.
        digests: stored file, relative to the payload → its SHA-256. On object stores, which keep checksums of their own, and in
            checkpoints of earlier releases, the files of the arrays' database are left out: each of its nodes and chunks has one.
        sizes: every stored file but this one → bytes.
        versions: the releases that wrote it, for people.
        facts: what the caller said about it, e.g. step and metrics: for lists and for retention, not for resuming.
    """

    arrays: Mapping[str, ArrayMetadata]
    digests: Mapping[str, str]
    sizes: Mapping[str, int]
    versions: Mapping[str, str]
    facts: Mapping[str, Any]

    def to_json(self) -> bytes:
        """The manifest as a JSON document, UTF-8."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Inverse of :meth:`to_json`.

        Raises:
            CorruptCheckpointError: it is no manifest that a save writes, e.g. a name leads out of the payload.
        """
        try:
            return cls._checked(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptCheckpointError(
                f"the manifest is none that a save writes ({type(error).__name__}: {str(error)[:200]}); do not use the checkpoint"
            ) from error

    @classmethod
    def _checked(cls, fields: dict[str, Any]) -> Manifest:
        for name in (*fields["digests"], *fields["sizes"]):
            if name.startswith("/") or re.search(r"[\\:\0]", name) or not all(part.strip(".") for part in name.split("/")):
                raise CorruptCheckpointError(f"the manifest names {name!r}, which is outside of the checkpoint; do not use it")
        arrays = {name: _checked_array(name, entry) for name, entry in fields["arrays"].items()}
        for part in ("digests", "versions"):
            if odd := [name for name, value in fields[part].items() if not isinstance(value, str)]:
                raise ValueError(f"{part}[{odd[0]!r}] is not a string")
        if odd := [name for name, value in fields["sizes"].items() if type(value) is not int or value < 0]:
            raise ValueError(f"sizes[{odd[0]!r}] is not a number of bytes")
        if not isinstance(fields["facts"], dict):
            raise TypeError("facts is no object")
        return cls(arrays, fields["digests"], fields["sizes"], fields["versions"], fields["facts"])


def _checked_array(name: str, entry: dict[str, Any]) -> ArrayMetadata:
    shape, dtype, key_impl = entry["shape"], entry["dtype"], entry["key_impl"]
    is_key = isinstance(dtype, str) and dtype.startswith("key<") and isinstance(key_impl, str)
    if not (is_key or (key_impl is None and _is_of_numbers(dtype))):
        raise ValueError(f"the array {name!r} has dtype {dtype!r}, which no array has")
    if not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)):
        raise ValueError(f"the array {name!r} has shape {str(shape)[:50]}")
    if math.prod(max(size, 1) for size in shape) >= _MOST_ELEMENTS:
        raise ValueError(f"the array {name!r} has shape {shape}, more elements than any array has")
    return ArrayMetadata(tuple(shape), dtype, key_impl)


def _is_of_numbers(dtype: object) -> bool:
    try:
        return isinstance(dtype, str) and jnp.dtype(dtype).name == dtype and jnp.dtype(dtype).kind in "biufcV"
    except TypeError:
        return False


def write_manifest(
    payload: epath.Path,
    arrays: Mapping[str, ArrayMetadata],
    files: Mapping[str, bytes],
    versions: Mapping[str, str],
    facts: Mapping[str, Any],
    others: Mapping[str, str],
) -> str:
    """Write the manifest of a payload in which everything else is complete; returns its SHA-256.

    Args:
        payload: its directory.
        arrays: what it describes.
        files: what is in the files of host state: their digests are of what was meant, not of what came to be written.
        versions, facts: see :class:`Manifest`.
        others: digests that other processes have taken, of the files that they wrote.
    """
    sizes = dict(filesystem.walk_files(payload))
    digests = {f"{FILES}/{name}": sha256(contents) for name, contents in files.items()}
    digests |= dict(others)
    digests |= {
        name: file_digest(payload / name)
        for name in sizes
        if name not in digests and not (filesystem.is_remote(payload) and _checks_itself(name))
    }
    data = Manifest(arrays, digests, sizes, versions, facts).to_json()
    filesystem.write_durably(payload / MANIFEST, data)
    filesystem.sync_directory(payload)
    return sha256(data)


def write_digests(payload: epath.Path, process: int) -> None:
    """Digests of the files that a process has written, for process 0, which takes them into the manifest."""
    own = payload / ARRAYS / f"ocdbt.process_{process}"
    names = [f"{ARRAYS}/{own.name}/{name}" for name, _ in filesystem.walk_files(own)] if own.is_dir() else []
    (payload / _DIGESTS).mkdir(exist_ok=True)
    found = {name: file_digest(payload / name) for name in names}
    filesystem.write_durably(payload / _DIGESTS / f"{process}.json", json.dumps(found).encode())


def take_digests(payload: epath.Path) -> dict[str, str]:
    """Digests that all processes have written with :func:`write_digests`; their files, no part of the checkpoint, are removed."""
    found: dict[str, str] = {}
    if (payload / _DIGESTS).is_dir():
        for file in (payload / _DIGESTS).iterdir():
            found |= json.loads(file.read_bytes())
        filesystem.remove_tree(payload / _DIGESTS)
    return found


def read_manifest(payload: epath.Path, expected_sha256: str, *, check_sizes: bool = True) -> Manifest:
    """The manifest of a committed payload, after checking that every file that it lists is there and as long as it was.

    Args:
        payload: its directory.
        expected_sha256: what the commit record says.
        check_sizes: False leaves that check to the caller.

    Raises:
        CorruptCheckpointError: lists every file that is missing or has another length.
    """
    if not payload.is_dir():
        raise CorruptCheckpointError(f"{payload.parent}: the committed payload {payload.name} is missing; {_NEXT_STEP}")
    if filesystem.is_link(payload):
        raise CorruptCheckpointError(f"{payload} is a symbolic link, which no save makes; do not use the checkpoint")
    try:
        data = filesystem.read_plain(payload / MANIFEST)
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{payload / MANIFEST} is missing; {_NEXT_STEP}") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{payload / MANIFEST} cannot be read ({error}); {_NEXT_STEP}") from None
    if sha256(data) != expected_sha256:
        raise CorruptCheckpointError(f"{payload / MANIFEST} is not the manifest that was committed; {_NEXT_STEP}")
    manifest = Manifest.from_json(data)
    damaged = wrong_sizes(payload, manifest) if check_sizes else {}
    if damaged:
        more = f" (and {len(damaged) - _SHOWN} more)" if len(damaged) > _SHOWN else ""
        shown = "; ".join(f"{name}: {what}" for name, what in list(damaged.items())[:_SHOWN])
        raise CorruptCheckpointError(
            f"{payload}: {len(damaged)} of {len(manifest.sizes)} files are damaged: {shown}{more}; {_NEXT_STEP}"
        )
    return manifest


_NEXT_STEP = "copy the checkpoint again, or restore another one"
_SHOWN = 10
_MOST_ELEMENTS = 1 << 44  # a hundred times the largest that anybody has trained


def wrong_sizes(payload: epath.Path, manifest: Manifest) -> dict[str, str]:
    """Files that are missing or have another length → what was found. Reads no file."""
    damaged = {}
    for name, size in manifest.sizes.items():
        try:
            found = filesystem.plain_size(payload, name)
        except FileNotFoundError:
            damaged[name] = "missing"
            continue
        except OSError as error:
            damaged[name] = f"{UNREADABLE}: {error}"
            continue
        if found != size:
            damaged[name] = f"expected {size} bytes, found {found}"
    return damaged


def _checks_itself(name: str) -> bool:
    """True for the files of the arrays' OCDBT database: nodes and chunks carry checksums."""
    return re.match(rf"{ARRAYS}/(?:ocdbt\.process_[^/]*/)?(?:d/|manifest\.ocdbt$)", name) is not None


def file_digest(path: epath.Path) -> str:
    """SHA-256 of a file, read from storage."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(functools.partial(file.read, 1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()
