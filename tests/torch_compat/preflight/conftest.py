"""The needs of every preflight test: libtpu told that there is no TPU, without a lasting change of the environment."""

from __future__ import annotations

import pytest

from xlatrain.host.libtpu_environment import ENVIRONMENT


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, compiled_as_for_users: None) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
