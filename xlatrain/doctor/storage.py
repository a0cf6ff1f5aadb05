"""Disk space, and the folder of compiled programs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from xlatrain.doctor.finding import Finding
from xlatrain.xla import compilation_cache

_LITTLE_BYTES = 2 << 30


def examine_storage() -> dict[str, Any]:
    """Free bytes where a run writes, and the compilation cache's folder, size in bytes and number of files (None: it is off)."""
    cache = compilation_cache.enable()
    folders = {"working folder": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    files = [path for path in cache.rglob("*") if path.is_file()] if cache else []
    return {
        "free_bytes": {name: shutil.disk_usage(path).free for name, path in folders.items()},
        "compilation_cache": {
            "folder": str(cache),
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
        }
        if cache
        else None,
    }


def check_storage(storage: Mapping[str, Any]) -> Iterator[Finding]:
    """Little space left, or a cache that cannot be written."""
    for name, free in storage["free_bytes"].items():
        if free < _LITTLE_BYTES:
            yield Finding("warning", "disk", f"{free >> 20} MiB free for the {name}", "checkpoints need more: clean up")
    cache = storage["compilation_cache"]
    if cache is None:
        yield Finding(
            "warning",
            "compilation cache",
            "off: XLATRAIN_CACHE_DIR is empty, or its folder cannot be made; every process compiles everything again",
            "set XLATRAIN_CACHE_DIR to a folder that can be written",
        )
    elif not os.access(cache["folder"], os.W_OK):
        yield Finding("warning", "compilation cache", f"{cache['folder']} cannot be written", "set XLATRAIN_CACHE_DIR")
