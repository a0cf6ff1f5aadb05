"""Asynchronous, atomically committed checkpoints: one file, or sharded by Orbax.

A checkpoint whose arrays are whole on every device is a file that ``torch.save`` wrote, with its commit record as the comment
of the archive (:func:`save_file`). A sharded one is a directory, conventionally ``X.ckpt``::

    X.ckpt/CURRENT                    one line: which payload is the checkpoint, and when it was committed
    X.ckpt/payload-<id>/arrays/       the arrays, an Orbax PyTree checkpoint (each process wrote its shards)
    X.ckpt/payload-<id>/files/        host state, written by process 0
    X.ckpt/payload-<id>/manifest.json names, shapes, dtypes, value digests; length and SHA-256 of every file

File and ``CURRENT`` are replaced atomically when what is new is complete, so that overwriting a path never loses both.
"""

from xlatrain.checkpoint.claims import Claim, claim
from xlatrain.checkpoint.directory import (
    check_shared,
    clean,
    commit_time_ns,
    is_checkpoint,
    is_checkpoint_directory,
    newest,
    remove,
)
from xlatrain.checkpoint.durable import DurableCopies
from xlatrain.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DirectoryInUseError,
    ForeignPathError,
)
from xlatrain.checkpoint.file_record import BodyWriter, check_body
from xlatrain.checkpoint.file_saving import save_file, write_file
from xlatrain.checkpoint.manifest import ArrayMetadata
from xlatrain.checkpoint.pending import PendingSave, wait_for_save, wait_for_saves
from xlatrain.checkpoint.reading import Checkpoint, open_checkpoint, saved_facts
from xlatrain.checkpoint.retention import Retention, entries, prune
from xlatrain.checkpoint.saving import FilesArgument, save
from xlatrain.checkpoint.verification import Verification, verify

__all__ = [
    "ArrayMetadata",
    "BodyWriter",
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
    "check_body",
    "check_shared",
    "claim",
    "clean",
    "commit_time_ns",
    "entries",
    "is_checkpoint",
    "is_checkpoint_directory",
    "newest",
    "open_checkpoint",
    "prune",
    "remove",
    "save",
    "save_file",
    "saved_facts",
    "verify",
    "wait_for_save",
    "wait_for_saves",
    "write_file",
]
