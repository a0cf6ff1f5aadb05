"""The manifest of a payload: which arrays and files are in it, and how long each stored file is.

It is what makes damage a named error at open time instead of wrong numbers later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from etils import epath

from xlatrain.checkpoint import filesystem
from xlatrain.checkpoint.errors import CorruptCheckpointError

MANIFEST = "manifest.json"
ARRAYS = "arrays"
FILES = "files"


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """One stored array.

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
        digests: name of each host file → its SHA-256.
        sizes: every stored file, relative to the payload → bytes.
        versions: the releases that wrote it, for people.
    """

    arrays: Mapping[str, ArrayMetadata]
    digests: Mapping[str, str]
    sizes: Mapping[str, int]
    versions: Mapping[str, str]

    def to_json(self) -> bytes:
        """One JSON document."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Inverse of :meth:`to_json`."""
        fields = json.loads(data)
        arrays = {
            name: ArrayMetadata(tuple(entry["shape"]), entry["dtype"], entry["key_impl"])
            for name, entry in fields["arrays"].items()
        }
        return cls(arrays, fields["digests"], fields["sizes"], fields["versions"])


def write_manifest(
    payload: epath.Path, arrays: Mapping[str, ArrayMetadata], digests: Mapping[str, str], versions: Mapping[str, str]
) -> str:
    """Write the manifest of a payload in which everything else is complete; returns its SHA-256."""
    data = Manifest(arrays, digests, dict(filesystem.walk_files(payload)), versions).to_json()
    filesystem.write_durably(payload / MANIFEST, data)
    filesystem.sync_directory(payload)
    return sha256(data)


def read_manifest(payload: epath.Path, expected_sha256: str) -> Manifest:
    """The manifest of a committed payload, after checking that every file that it lists is there and as long as it was.

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
    _check_sizes(payload, manifest)
    return manifest


_NEXT_STEP = "copy the checkpoint again, or restore another one"
_SHOWN = 10


def _check_sizes(payload: epath.Path, manifest: Manifest) -> None:
    damaged = []
    for name, size in manifest.sizes.items():
        try:
            found = (payload / name).stat().length
        except FileNotFoundError:
            damaged.append(f"{name}: missing")
            continue
        if found != size:
            damaged.append(f"{name}: expected {size} bytes, found {found}")
    if damaged:
        more = f" (and {len(damaged) - _SHOWN} more)" if len(damaged) > _SHOWN else ""
        raise CorruptCheckpointError(
            f"{payload}: {len(damaged)} of {len(manifest.sizes)} files are damaged: {'; '.join(damaged[:_SHOWN])}{more}; "
            f"{_NEXT_STEP}"
        )


def sha256(data: bytes) -> str:
    """Hexadecimal digest."""
    return hashlib.sha256(data).hexdigest()
