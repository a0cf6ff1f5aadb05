"""A sharding table in a file; as a picture it is a bar of bytes per device, and how the largest parameters are cut."""

from __future__ import annotations

import json
import math
import os
from html import escape
from pathlib import Path

from xlatrain.mesh.sharding.sharding_table import ShardingTable, TensorPlace, human, split_in_words

_WIDTH, _BAR, _ROW, _LEFT = 960, 26, 64, 380
_SPLIT, _WHOLE, _LINE, _TEXT = "#4c78a8", "#e45756", "#ffffff", "#222222"
_MOST, _NAME, _WHY = 24, 46, 84  # parameters drawn; characters of a name, and of a reason, that fit


def svg(table: ShardingTable) -> str:
    """The picture as an SVG document of its own."""
    shown = [place for place in table.largest(len(table.places)) if place.role == "parameter"][:_MOST]
    parts = [_text(12, 24, f"mesh {' × '.join(f'{n}={s}' for n, s in table.axes.items())}, {table.devices} devices", bold=True)]
    parts.append(_text(12, 46, f"{human(table.bytes_per_device())} on each device; blue: split, red: a whole copy on each"))
    y = 62
    parts += _bar(table, y)
    y += _BAR + 34
    for place in shown:
        parts += _parameter(place, table.axes, y)
        y += _ROW
    left_out = sum(place.role == "parameter" for place in table.places) - len(shown)
    if left_out:
        parts.append(_text(12, y + 12, f"and {left_out} smaller parameters"))
        y += 24
    for warning in table.warnings:
        parts.append(_text(12, y + 12, f"warning: {warning}"))
        y += 22
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 12}" viewBox="0 0 {_WIDTH} {y + 12}" {style}>'
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{y + 12}" fill="white"/>', *parts, "</svg>", ""])


def _bar(table: ShardingTable, y: int) -> list[str]:
    """Every tensor as a piece of one device's memory, largest first."""
    total = max(table.bytes_per_device(), 1)
    x, parts = 12.0, []
    for place in table.largest(len(table.places)):
        width = (_WIDTH - 24) * place.bytes_per_device / total
        title = f"{place.path} ({place.role}): {human(place.bytes_per_device)} of {human(place.bytes_whole)}"
        parts.append(_box(x, y, width, _BAR, _colour(place), title))
        x += width
    return parts


def _parameter(place: TensorPlace, axes: dict[str, int], y: int) -> list[str]:
    """A parameter's last two dims as a rectangle, cut where the mesh cuts it."""
    cuts = [_cuts(dim, axes) for dim in place.spec] + [1] * (len(place.shape) - len(place.spec))
    rows, columns = (1, cuts[0]) if len(cuts) == 1 else (math.prod(cuts[:-1]), cuts[-1]) if cuts else (1, 1)
    shape = "×".join(map(str, place.shape)) or "scalar"
    parts = [
        _text(12, y + 14, _shortened(place.path, _NAME), bold=True),
        _text(12, y + 31, f"{shape} {place.dtype}, {_over(place)}"),
        _text(12, y + 47, f"{human(place.bytes_per_device)} of {human(place.bytes_whole)} · {place.rule}"),
    ]
    width, height = _WIDTH - _LEFT - 12, _ROW - 14
    for row in range(rows):
        for column in range(columns):
            x, top = _LEFT + width * column / columns, y + 4 + height * row / rows
            parts.append(_box(x, top, width / columns, height / rows, _colour(place), "; ".join(place.reasons) or place.rule))
    if rows == columns == 1:
        parts += [_text(_LEFT + 10, y + 20 + 16 * i, _shortened(r, _WHY), fill=_LINE) for i, r in enumerate(place.reasons[:2])]
    return parts


def _over(place: TensorPlace) -> str:
    return f"over {split_in_words(place.spec)}" if any(place.spec) else "whole"


def _cuts(axes: str | tuple[str, ...] | None, mesh: dict[str, int]) -> int:
    return math.prod(mesh[name] for name in ((axes,) if isinstance(axes, str) else axes or ()))


def _colour(place: TensorPlace) -> str:
    return _SPLIT if place.bytes_per_device < place.bytes_whole else _WHOLE


def _box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    line = f'stroke="{_LINE}" stroke-width="{1 if min(width, height) > 3 else 0.2}"'
    at = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {at} fill="{fill}" {line}><title>{escape(title)}</title></rect>'


def _shortened(text: str, length: int) -> str:
    """The text, with its middle left out if it is longer than ``length``."""
    half = (length - 1) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"


def _text(x: float, y: float, text: str, *, bold: bool = False, fill: str = _TEXT) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}"{weight}>{escape(text)}</text>'


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
