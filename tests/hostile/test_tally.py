"""The tally of a long drill."""

from __future__ import annotations

import collections
from pathlib import Path

from tests.hostile import tally
from tests.hostile.tally import Tally


def test_pieces_add_up_over_starts(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tally.json"
    assert tally.read(path) == {}
    kept = {"damages": Tally()}
    kept["damages"].add(250, 1.5, collections.Counter(found=240, missed=10))
    tally.write(path, kept)
    again = tally.read(path)
    again["damages"].add(50, 0.5, collections.Counter(found=50))
    tally.write(path, again)
    assert tally.read(path)["damages"] == Tally(300, 2.0, collections.Counter(found=290, missed=10))
    assert [file.name for file in path.parent.iterdir()] == ["tally.json"]
    assert str(tally.read(path)["damages"]) == "300 (found: 290, missed: 10) in 2 s"
