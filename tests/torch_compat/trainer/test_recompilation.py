"""Reports of compilations after the first."""

from __future__ import annotations

import pytest

from torch_compat.run.report import ExecutorLog
from torch_compat.step.recompilation import Recompilations


@pytest.mark.parametrize(("name", "fix"), [("value of batch leaf 0", "put texts into a list"), ("self.beta", None)])
def test_the_fix_fits_what_changed(name: str, fix: str | None) -> None:
    log = ExecutorLog()
    followed = Recompilations(log, None)
    with pytest.warns(UserWarning, match="training_step was compiled 4 times") as caught:
        for value in "abcd":
            followed.count_capture("training_step", {name: repr(value)})
    assert log.recompilations[-1] == f"training_step: {name}: 'c' → 'd'"
    said = str(caught[0].message)
    assert "utilities.padding" in said and ("put texts into a list" in said) == (fix is not None)
