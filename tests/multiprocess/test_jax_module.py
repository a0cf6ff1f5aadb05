"""A JaxModule on two processes: born there, whole on none of them, killed, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.multiprocess.pod import SCRIPTS, TIMEOUT_S, environment, results
from xlatrain.host.host_memory import LIMIT_VARIABLE

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_born_killed_and_resumed_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(1 << 20))  # less than the large kernel
    state = str(tmp_path / "state.ckpt")
    (alone,) = results("jax_module", 1, 4, tmp_path / "alone", state, "whole")
    whole = results("jax_module", 2, 2, tmp_path / "whole", state, "whole")
    killed = [str(SCRIPTS / "jax_module.py"), str(tmp_path), state, "killed"]
    assert warm.run_pod(killed, 2, 2, env=environment(), timeout=TIMEOUT_S).returncode != 0
    resumed = results("jax_module", 2, 2, tmp_path / "resumed", state, "resumed")
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][2:]
        assert after["statistics"] == before["statistics"]
        assert before["shards"] == after["shards"] == ["(160, 640)"]
        assert not before["here"]
        np.testing.assert_allclose(before["losses"], alone["losses"], rtol=2e-5)
