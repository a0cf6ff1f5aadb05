"""A checksum with every stored chunk of an array: CRC-32C, by zarr 3's own codec.

TensorStore computes it while a chunk is compressed, on the threads that write, and compares it whenever a chunk is read: a
flipped bit is an error that names the array, at every restore, and costs no pass of its own over the data. OCDBT's own files (its
B-tree nodes, in which the arrays' metadata are, and its manifest) have such checksums already.

Orbax has no option for codecs (0.12), so that the codec is put into the specification that Orbax makes for TensorStore, of those
arrays that are saved with :data:`CHECKED`. Any reader of zarr 3 reads the arrays as before.

zarr 3 codec: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/crc32c/index.html
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils


class _Checked(int):
    """A true value that is told from any other one."""


CHECKED: Any = _Checked(1)
"""``use_compression`` of an Orbax handler whose chunks are compressed, as by default, and get a checksum."""

CODEC = {"name": "crc32c"}

_build = tensorstore_utils.build_array_write_spec


@functools.wraps(_build)
def _build_checked(info: Any, *args: Any, **kwargs: Any) -> Any:
    spec = _build(info, *args, **kwargs)
    if info.use_compression is CHECKED:
        chunk_codecs = list(_chunk_codecs(spec.json))
        if not chunk_codecs:
            raise RuntimeError(
                "this release of orbax-checkpoint describes arrays in another way than 0.12, so that their chunks would have no "
                "checksums; install orbax-checkpoint 0.12.8"
            )
        for codecs in chunk_codecs:
            codecs.append(CODEC)
    return spec


tensorstore_utils.build_array_write_spec = _build_checked


def _chunk_codecs(spec: dict[str, Any]) -> Iterator[list[Any]]:
    """The codec lists of single chunks, inside those of zarr shards, of a specification with or without a ``cast`` around it."""
    zarr = spec.get("base", spec)
    for codec in zarr.get("metadata", {}).get("codecs", ()):
        if codec["name"] == "sharding_indexed":
            yield codec["configuration"]["codecs"]
