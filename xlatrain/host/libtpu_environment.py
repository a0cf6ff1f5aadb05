"""Environment variables that libtpu reads when it is loaded, on a machine without TPUs."""

from __future__ import annotations

import os
from importlib.util import find_spec

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # else it waits minutes for a metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second process fails at the lock
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # without these three it prints that they are missing
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_STDERR_LOG_LEVEL": "4",
    "TF_CPP_MIN_LOG_LEVEL": "4",
}


def keep_quiet() -> None:
    """Let JAX look for TPUs without waiting and without words, where libtpu is installed on a machine that has none.

    Nothing happens once JAX has started, or where its platforms are chosen.
    """
    import jax
    from jax._src import hardware_utils, xla_bridge

    if xla_bridge.backends_are_initialized() or jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        return
    if find_spec("libtpu") is not None and not hardware_utils.num_available_tpu_chips_and_device_id()[0]:
        set_environment()


def set_environment() -> None:
    """Set the variables that are not set: a user's own settings stay."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
