"""Checkpoint files in the layout of 2.6: ``python -m torch_compat -m lightning.pytorch.utilities.upgrade_checkpoint PATH``.

API: ``lightning.pytorch.utilities.upgrade_checkpoint``.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_compat.trainer.migration import migrate_checkpoint


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Upgrade checkpoint files; the old ones are kept as FILE.bak.")
    parser.add_argument("path", help="a file, or a folder whose files with the extension are upgraded")
    parser.add_argument("--extension", "-e", default=".ckpt", help="of the files in a folder")
    parser.add_argument("--map-to-cpu", action="store_true", help="accepted; tensors always come to the CPU")
    parser.add_argument("--trusted", action="store_true", help="unpickle everything: only for checkpoints that you trust")
    args = parser.parse_args(arguments)
    path = Path(args.path)
    if not path.exists():
        parser.error(f"the path {path} does not exist")
    files = [path] if path.is_file() else sorted(path.glob(f"**/*{args.extension}"))
    if not files:
        parser.error(f"no files with the extension {args.extension} in {path}")
    for file in files:
        upgrade(file, trusted=args.trusted)
        print(f"upgraded {file}")


def upgrade(file: Path, *, trusted: bool = False) -> None:
    """Rewrite a checkpoint file; the old one is kept as ``FILE.bak``.

    Raises:
        MisconfigurationException: a checkpoint of 1.x with the state of its loops.
        pickle.UnpicklingError: the safe loader cannot read it, and it is not ``trusted``.
    """
    checkpoint, _ = migrate_checkpoint(torch.load(file, map_location="cpu", weights_only=not trusted))
    shutil.copyfile(file, file.with_name(f"{file.name}.bak"))
    torch.save(checkpoint, file)


if __name__ == "__main__":
    main()
