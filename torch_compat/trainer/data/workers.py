"""Workers of a DataLoader in a process where JAX runs, and how they are started.

Workers are forked wherever Python forks by default, as in any PyTorch script. A fork server or spawned workers would be free of
the parent's threads, but they cannot run what unchanged scripts contain: a main module without a ``__main__`` guard (it
would be run again), lambdas and other objects that don't pickle, module globals set at run time (they would silently have other
values), large datasets shared by copy on write (they would be copied to every worker).

JAX warns at every fork that its threads may deadlock the child. A child that computes with JAX does hang: that is refused here by
an error. A worker that uses torch and numpy does not touch any lock of JAX's threads: 800 workers forked while programs of 8 CPU
devices were in flight all delivered. It is the same situation as workers forked after CUDA has started. So the warning is
kept from those forks only; a user's ``multiprocessing_context`` is always respected, and is the way for datasets that use JAX.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import sys
import warnings
from typing import Any

from torch.utils.data import DataLoader

from torch_compat.utilities.data import suggested_max_num_workers
from torch_compat.utilities.rank_zero import rank_zero_warn
from torch_compat.utilities.warnings import PossibleUserWarning

_FORK_WARNINGS = (
    (r"os\.fork\(\) was called", RuntimeWarning),  # JAX
    (r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning),  # Python 3.12+
)


class _WorkerProcess(multiprocessing.context.ForkProcess):
    def run(self) -> None:
        _refuse_jax()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with warnings.catch_warnings():
            for message, category in _FORK_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            return multiprocessing.context.ForkProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_jax() -> None:
    """Refuse JAX in a forked worker: an error instead of a hang for a dataset that computes with it.

    Arrays that are there can be read.
    """
    xla_bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if xla_bridge is None or not xla_bridge.backends_are_initialized():
        return  # the child can start a backend of its own

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "a DataLoader worker computes with JAX, but it is a fork of a process in which JAX runs, and would hang: use numpy "
            "or torch in the dataset, or give the DataLoader multiprocessing_context='spawn', or num_workers=0"
        )

    xla_bridge.backends = xla_bridge.devices = xla_bridge.get_backend = xla_bridge.local_devices = refuse
    # Compiled functions that are cached would still run: another setting, of those that programs depend on, makes them new.
    import jax

    jax.config.update("jax_default_matmul_precision", "BF16_BF16_F32_X9")


class WorkerContext(multiprocessing.context.ForkContext):
    """Python's fork context for processes that never use JAX."""

    Process = _WorkerProcess  # pyright: ignore[reportAssignmentType]


def worker_context(loader: DataLoader) -> WorkerContext | None:
    """The context to start ``loader``'s workers with; None where the loader's own is right.

    That is: no workers, a context given by the user, or a platform that does not fork by default.
    """
    if loader.num_workers == 0 or loader.multiprocessing_context is not None:
        return None
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return WorkerContext() if method == "fork" else None


def warn_of_workers(loader: DataLoader, name: str, *, reloads: bool) -> None:
    """Say what would make a loader's workers faster, or could make them fail.

    Args:
        name: of the loader.
        reloads: whether it is made anew during training.
    """
    workers = suggested_max_num_workers(1)  # one process per host
    context: Any = loader.multiprocessing_context or multiprocessing
    if loader.num_workers > 0 and not loader.persistent_workers and context.get_start_method() == "spawn":
        rank_zero_warn(
            f"Consider setting `persistent_workers=True` in '{name}' to speed up the dataloader: "
            "its workers start anew in every epoch."
        )
    elif loader.num_workers < 2 and workers > 1:
        rank_zero_warn(
            f"The '{name}' does not have many workers which may be a bottleneck. Consider increasing the value of the "
            f"`num_workers` argument: this machine has processors for {workers}.",
            category=PossibleUserWarning,
        )
    if loader.persistent_workers and loader.pin_memory and reloads:
        rank_zero_warn(
            "The combination of `DataLoader(`pin_memory=True`, `persistent_workers=True`) and "
            "`Trainer(reload_dataloaders_every_n_epochs > 0)` can lead to instability: see "
            "https://github.com/pytorch/pytorch/issues/91252. `pin_memory=False` avoids it.",
            category=PossibleUserWarning,
        )
