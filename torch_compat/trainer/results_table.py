"""The table of metrics that ``validate`` and ``test`` print, laid out as stock's."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch

_LOADER = re.compile(r"/dataloader_idx_\d+$")
_COLUMN = 25
"""Least width of a column, in characters."""


def print_results(results: Sequence[Mapping[str, Any]], fn: str) -> None:
    """Print a column for each dataloader, a row for each metric; several tables where the terminal is too narrow for one.

    Args:
        results: what ``validate`` or ``test`` returns.
        fn: ``"validate"`` or ``"test"``.
    """
    columns = [{_LOADER.sub("", name): value for name, value in one.items()} for one in results]
    names = sorted({name for column in columns for name in column})
    if not names:
        return
    headers = [f"DataLoader {index}" for index in range(len(columns))]
    terminal = shutil.get_terminal_size(fallback=(120, 30)).columns
    width = min(max(_COLUMN, *map(len, (*names, *headers))), terminal // 2)
    at_once = max(terminal // width - 1, 1)  # beside the names
    for start in range(0, len(columns), at_once):
        shown = slice(start, start + at_once)
        _print_table(f"{fn} metric".capitalize(), headers[shown], names, columns[shown], width)


def _print_table(
    title: str, headers: Sequence[str], names: Sequence[str], columns: Sequence[Mapping[str, float]], width: int
) -> None:
    from rich import get_console
    from rich.table import Column, Table

    first = Column(title, justify="center", style="cyan", width=width)
    table = Table(first, *(Column(header, justify="center", style="magenta", width=width) for header in headers))
    for name in names:
        table.add_row(name, *(_text(column[name]) if name in column else "" for column in columns))
    get_console().print(table)


def _text(value: float) -> str:
    return str(value.item() if isinstance(value, torch.Tensor) else value)
