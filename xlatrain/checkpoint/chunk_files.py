"""The files in which the chunks of an array are: the index (a B+tree) of TensorStore's database OCDBT, and its errors.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from etils import epath

_CHUNK = re.compile(r'"([^"]+/c(?:/\d+)*)"')
_FILE = re.compile(r'local file "([^"]*[^"/])"')


def damaged_array(error: str) -> str | None:
    """The array that TensorStore could not read, by its error; None if it was an index of many."""
    chunk = _CHUNK.search(error)
    return chunk and re.sub(r"/c(?:/\d+)*$", "", chunk.group(1))


def damaged_file(arrays: epath.Path, error: str) -> str | None:
    """The file in which TensorStore, by its error, found damage; None if it cannot be told.

    Args:
        arrays: the directory of the database.
        error: TensorStore's message: of a chunk it names the array and the chunk, of the index the file.

    Returns:
        A name relative to ``arrays``.
    """
    root = os.fspath(arrays)
    for file in _FILE.findall(error):
        if file.startswith(root + os.sep):
            return os.path.relpath(file, root).replace(os.sep, "/")
    chunk = _CHUNK.search(error)
    try:
        return chunk and dict(_chunk_files(arrays)).get(chunk.group(1))
    except (OSError, ValueError):  # the index is damaged too
        return None


def _chunk_files(arrays: epath.Path) -> Iterator[tuple[str, str]]:
    """Name of every chunk that is not in the index itself → its file."""
    import tensorstore as ts  # 15 MiB, and needed once a file is damaged

    store = ts.KvStore.open(os.fspath(arrays) + "/" if "://" in os.fspath(arrays) else f"file://{arrays}/").result()
    for version in ts.ocdbt.dump(store).result()["versions"][-1:]:
        if location := version["root"].get("location"):
            yield from _below(ts.ocdbt, store, location, "")


def _below(ocdbt: Any, store: Any, location: str, prefix: str) -> Iterator[tuple[str, str]]:
    node = ocdbt.dump(store, location).result()
    for entry in node["entries"]:
        if node.get("height", 0):
            yield from _below(ocdbt, store, entry["location"], prefix + entry.get("subtree_common_prefix", b"").decode())
        elif value := entry.get("indirect_value"):
            _, directory, name, _, _ = ("value:" + value.removeprefix("value:")).split(":")
            yield prefix + entry["key"].decode(), directory + name
