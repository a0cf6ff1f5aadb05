"""A checksum with every stored chunk of an array: the content checksum (xxHash64) of the zstd frame that the chunk is.

TensorStore computes it while a chunk is compressed, on the threads that write, and compares it whenever one is read, while the
decompressed block is still in the cache: a flipped bit is an error that names the array, at every restore, and costs no pass of
its own over the data. OCDBT's own files (its B-tree nodes, in which the arrays' metadata are, and its manifest) have checksums
already.

Orbax has no option for the settings of its codec (0.12), so that the checksum is switched on in the specification that Orbax
makes for TensorStore, of those arrays that are saved with :data:`CHECKED`. Any reader of zarr 3 reads the arrays as before. They
are compressed at zstd's first level, where Orbax takes the third: weights hardly compress, and the time saved pays for the
checksum.

zarr 3 codec: https://github.com/zarr-developers/zarr-extensions/tree/main/codecs/zstd
Frame: https://www.rfc-editor.org/rfc/rfc8878#section-3.1.1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from orbax.checkpoint._src.serialization import tensorstore_utils


class _Checked(int):
    """A value that is true, and equal to no other."""


CHECKED: Any = _Checked(1)
"""``use_compression`` of an Orbax handler whose chunks are compressed, as by default, and get a checksum."""

_build = tensorstore_utils.build_array_write_spec


@functools.wraps(_build)
def _build_checked(info: Any, *args: Any, **kwargs: Any) -> Any:
    spec = _build(info, *args, **kwargs)
    if info.use_compression is CHECKED:
        compressors = [codec for codec in _chunk_codecs(spec.json) if codec["name"] == "zstd"]
        if len(compressors) != 1:
            raise RuntimeError(
                "this release of orbax-checkpoint describes arrays in another way than 0.12, so that their chunks would have no "
                "checksums; install orbax-checkpoint 0.12.8"
            )
        compressors[0]["configuration"].update(checksum=True, level=1)
    return spec


tensorstore_utils.build_array_write_spec = _build_checked


def _chunk_codecs(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The codecs of single chunks, inside those of zarr shards, of a specification with or without a ``cast`` around it."""
    zarr = spec.get("base", spec)
    for codec in zarr.get("metadata", {}).get("codecs", ()):
        if codec["name"] == "sharding_indexed":
            yield from codec["configuration"]["codecs"]
