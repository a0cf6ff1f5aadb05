"""Tests of the torch-xla path run in an environment of their own: ``make test-torch-xla``."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch_xla") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def four_devices() -> None:
    """SPMD, switched on by the first Trainer, before any test makes tensors or a backward pass on the host."""
    from tests.torch_xla.training import trainer

    trainer("torch_xla", 4)
