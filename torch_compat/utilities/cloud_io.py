"""Filesystems by path: local directories and, through fsspec, ``gs://``, ``s3://``. API:
``lightning.fabric.utilities.cloud_io``."""

from __future__ import annotations

import os
from typing import Any

import fsspec
import torch
from fsspec.utils import get_protocol

from torch_compat.utilities.types import _PATH

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "adl", "az"})


def get_filesystem(path: str | os.PathLike[str], **kwargs: Any) -> fsspec.AbstractFileSystem:
    """The filesystem that ``path`` names; ``kwargs`` are the filesystem's own options."""
    filesystem, _ = fsspec.core.url_to_fs(os.fspath(path), **kwargs)
    return filesystem


def is_local_path(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is on a filesystem of this machine (no ``scheme://``, or ``file://``)."""
    return get_protocol(os.fspath(path)) in ("file", "local")


_is_local_file_protocol = is_local_path


def _atomic_save(checkpoint: dict[str, Any], filepath: _PATH) -> None:
    """``torch.save`` to a path or URL, under its name only once it is whole."""
    filesystem, path = fsspec.core.url_to_fs(os.fspath(filepath))
    with filesystem.transaction, filesystem.open(path, "wb") as file:
        torch.save(checkpoint, file)


def _is_object_storage(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether the filesystem is an object store of Amazon, Google or Microsoft."""
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return not _OBJECT_STORES.isdisjoint(protocols)


def _is_dir(fs: fsspec.AbstractFileSystem, path: _PATH, strict: bool = False) -> bool:
    """Whether ``path`` is a folder; of an object store, whose folders need not exist, whether its bucket is there.

    Args:
        strict: in an object store too, something must lie in the folder.
    """
    text = os.fspath(path)
    if fs.isdir(text) or strict or not _is_object_storage(fs):
        return fs.isdir(text)
    bucket = text.partition("://")[2].partition("/")[0] if "://" in text else text.partition("/")[0]
    return bool(fs.isdir(bucket))
