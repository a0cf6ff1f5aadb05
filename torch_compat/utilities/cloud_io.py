"""Filesystems by path: local directories and, through fsspec, `gs://`, `s3://`, ..."""

from __future__ import annotations

import os
from typing import Any

import fsspec
from fsspec.utils import get_protocol


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> fsspec.AbstractFileSystem:
    """The filesystem that `path` names; `kwargs` are the filesystem's own options."""
    filesystem, _ = fsspec.core.url_to_fs(os.fspath(path), **kwargs)
    return filesystem


def is_local_path(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is on a filesystem of this machine (no `scheme://`, or `file://`)."""
    return get_protocol(os.fspath(path)) in ("file", "local")
