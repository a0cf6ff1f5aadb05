"""Who hangs is named, wherever and however; the long form is `make hostile`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.hangs import Hang, hangs, what_is_said

pytestmark = pytest.mark.multiprocess

SOME = {
    Hang("the loader", "sleeps", 1): "named, with its stack",
    Hang("on_train_batch_end", "spins", 0): "named, with its stack",
    Hang("training_step", "waits for a lock", 1): "named; it compiles",
    Hang("configure_optimizers", "waits in a collective of its own", 0): "at odds",
}


def test_there_are_many_and_each_is_there_once() -> None:
    assert len(set(hangs())) == len(hangs()) >= 50
    assert set(SOME) <= set(hangs())


@pytest.mark.slow
@pytest.mark.parametrize("hang", SOME, ids=str)
def test_the_others_learn_who_hangs_and_where(hang: Hang, tmp_path: Path) -> None:
    assert what_is_said(hang, tmp_path) == SOME[hang]
