"""Sharded, asynchronous, atomically committed checkpoints, by Orbax.

A checkpoint is a directory, conventionally ``X.ckpt``::

    X.ckpt/CURRENT                    one line: which payload is the checkpoint, and when it was committed
    X.ckpt/payload-<id>/arrays/       the arrays, an Orbax PyTree checkpoint (each process wrote its shards)
    X.ckpt/payload-<id>/files/        host state, written by process 0
    X.ckpt/payload-<id>/manifest.json names, shapes, dtypes, value digests; length and SHA-256 of every file

``CURRENT`` is replaced atomically when a new payload is complete, so that overwriting a path never loses both.
"""

from xlatrain.checkpoint.claims import Claim, claim
from xlatrain.checkpoint.directory import check_shared, clean, commit_time_ns, is_checkpoint, newest, remove
from xlatrain.checkpoint.durable import DurableCopies
from xlatrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryInUseError,
    ForeignPathError,
)
from xlatrain.checkpoint.manifest import ArrayMetadata
from xlatrain.checkpoint.pending import PendingSave, wait_for_saves
from xlatrain.checkpoint.reading import Checkpoint, open_checkpoint
from xlatrain.checkpoint.retention import Retention, entries, prune
from xlatrain.checkpoint.saving import FilesArgument, save
from xlatrain.checkpoint.verification import Verification, verify

__all__ = [
    "ArrayMetadata",
    "Checkpoint",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "Claim",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "DurableCopies",
    "FilesArgument",
    "ForeignPathError",
    "PendingSave",
    "Retention",
    "Verification",
    "check_shared",
    "claim",
    "clean",
    "commit_time_ns",
    "entries",
    "is_checkpoint",
    "newest",
    "open_checkpoint",
    "prune",
    "remove",
    "save",
    "verify",
    "wait_for_saves",
]
