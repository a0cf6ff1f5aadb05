"""Errors about checkpoints, by name."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be saved or restored."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The path holds nothing, or a save was begun there and never committed."""


class ForeignPathError(CheckpointError, FileExistsError):
    """The path holds something that :func:`xlatrain.checkpoint.save` did not write, so it is neither read nor overwritten."""


class DirectoryInUseError(CheckpointError):
    """Another run, which is alive, writes checkpoints to the directory."""


class CorruptCheckpointError(CheckpointError):
    """A committed checkpoint lost a file, or a file does not have the contents that were committed."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The arrays in the checkpoint are not those that the template asks for (names, shapes or dtypes)."""
