"""How DataLoader workers are started in a process where JAX runs.

Workers are forked wherever Python forks by default, as in any PyTorch script. A fork server or spawned workers would be free of
the parent's threads, but they cannot run what unchanged scripts contain: a main module without a ``__main__`` guard (it
would be run again), lambdas and other objects that don't pickle, module globals set at run time (they would silently have other
values), large datasets shared by copy on write (they would be copied to every worker).

JAX warns at every fork that its threads may deadlock the child. A child that uses JAX does hang; a worker, which uses torch and
numpy, does not touch any lock of JAX's threads: 800 workers forked while programs of 8 CPU devices were in flight all
delivered. It is the same situation as workers forked after CUDA has started. So the warning is kept from those forks only;
a user's ``multiprocessing_context`` is always respected, and is the way for datasets that do use JAX.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import warnings
from typing import Any

from torch.utils.data import DataLoader

_FORK_WARNINGS = (
    (r"os\.fork\(\) was called", RuntimeWarning),  # JAX
    (r"This process \(pid=\d+\) is multi-threaded", DeprecationWarning),  # Python 3.12+
)


class _WorkerProcess(multiprocessing.context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with warnings.catch_warnings():
            for message, category in _FORK_WARNINGS:
                warnings.filterwarnings("ignore", message, category)
            return multiprocessing.context.ForkProcess._Popen(process_obj)  # pyright: ignore[reportAttributeAccessIssue]


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
