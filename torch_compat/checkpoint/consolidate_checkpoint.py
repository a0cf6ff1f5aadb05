"""A checkpoint directory as one file: ``python -m torch_compat -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER``.

API: ``lightning.pytorch.utilities.consolidate_checkpoint``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_compat.checkpoint.checkpoint_dict import export_checkpoint_file
from torch_compat.utilities.load import _METADATA_FILENAME, _load_distributed_checkpoint
from xlatrain.checkpoint import is_checkpoint_directory


def _format_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of torch's FSDP with its model under ``state_dict`` and its optimizers under ``optimizer_states``."""
    numbered = sorted(name for name in checkpoint if name.startswith("optimizer_"))
    states = [checkpoint.pop(name) for name in numbered]
    return {**checkpoint, "state_dict": checkpoint.pop("model", checkpoint.get("state_dict")), "optimizer_states": states}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write one .ckpt file of a sharded checkpoint directory.")
    parser.add_argument("checkpoint_folder", help="a directory that the Trainer or FSDP of stock Lightning saved")
    parser.add_argument("--output_file", help="where to write; by default FOLDER.consolidated")
    parser.add_argument("--trusted", action="store_true", help="unpickle everything: only for checkpoints that you trust")
    args = parser.parse_args(arguments)
    folder = Path(args.checkpoint_folder)
    target = Path(args.output_file or f"{os.fspath(folder)}.consolidated")
    if target.exists():
        parser.error(f"the path for the converted checkpoint already exists: {target}; choose another with --output_file")
    consolidate(folder, target, trusted=args.trusted)
    print(f"{folder} → {target}")


def consolidate(folder: Path, target: Path, *, trusted: bool = False) -> None:
    """Write ``target`` of our checkpoint directory, or of one that stock's FSDP strategy saved.

    Raises:
        FileNotFoundError: it is neither.
    """
    if is_checkpoint_directory(folder):
        export_checkpoint_file(folder, target, weights_only=not trusted)
    else:
        torch.save(_format_checkpoint(_load_distributed_checkpoint(folder)), target)


__all__ = ["_METADATA_FILENAME", "consolidate", "main"]

if __name__ == "__main__":
    main()
