"""The manifest of a payload: which arrays and files are in it, length and digest of each stored file.

It is what makes damage a named error at open time instead of wrong numbers later.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
ARRAYS = "arrays"
FILES = "files"


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
        digests: stored file, relative to the payload → its SHA-256; files of the arrays' database have checksums in themselves.
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
            CorruptCheckpointError: a name leads out of the payload: no save writes such a one.
        """
        fields = json.loads(data)
        for name in (*fields["digests"], *fields["sizes"]):
            if name.startswith("/") or re.search(r"[\\:\0]", name) or not all(part.strip(".") for part in name.split("/")):
                raise CorruptCheckpointError(f"the manifest names {name!r}, which is outside of the checkpoint; do not use it")
        arrays = {
            name: ArrayMetadata(tuple(entry["shape"]), entry["dtype"], entry["key_impl"])
            for name, entry in fields["arrays"].items()
        }
        return cls(arrays, fields["digests"], fields["sizes"], fields["versions"], fields["facts"])


def write_manifest(
    payload: epath.Path,
    arrays: Mapping[str, ArrayMetadata],
    files: Mapping[str, bytes],
    versions: Mapping[str, str],
    facts: Mapping[str, Any],
) -> str:
    """Write the manifest of a payload in which everything else is complete; returns its SHA-256.

    Args:
        payload: its directory.
        arrays: what it describes.
        files: what is in the files of host state: their digests are of what was meant, not of what came to be written.
        versions, facts: see :class:`Manifest`.
    """
    sizes = dict(filesystem.walk_files(payload))
    digests = {f"{FILES}/{name}": sha256(contents) for name, contents in files.items()}
    digests |= {name: file_digest(payload / name) for name in sizes if name not in digests and not _checks_itself(name)}
    data = Manifest(arrays, digests, sizes, versions, facts).to_json()
    filesystem.write_durably(payload / MANIFEST, data)
    filesystem.sync_directory(payload)
    return sha256(data)


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
    try:
        data = (payload / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"{payload / MANIFEST} is missing; {_NEXT_STEP}") from None
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


def wrong_sizes(payload: epath.Path, manifest: Manifest) -> dict[str, str]:
    """Files that are missing or have another length → what was found. Reads no file."""
    damaged = {}
    for name, size in manifest.sizes.items():
        try:
            found = (payload / name).stat().length
        except FileNotFoundError:
            damaged[name] = "missing"
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
