"""A sharding table in a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from xlatrain.mesh.sharding.picture import svg
from xlatrain.mesh.sharding.table import ShardingTable

ENDINGS = (".svg", ".json", ".txt")


def save_table(table: ShardingTable, path: str | os.PathLike[str]) -> Path:
    """Write a table as a picture (``.svg``), as JSON (``.json``), or as text (``.txt``).

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    check_ending(path)
    text = {".svg": svg, ".json": lambda table: json.dumps(table.to_dict(), indent=1), ".txt": lambda table: f"{table}\n"}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[path.suffix](table), encoding="utf-8")
    return path


def check_ending(path: str | os.PathLike[str]) -> None:
    """Raises:
    ValueError: a path that :func:`save_table` cannot write.
    """
    if Path(path).suffix not in ENDINGS:
        raise ValueError(f"shardings cannot be written to {str(path)!r}: expected a path that ends in {', '.join(ENDINGS)}")
