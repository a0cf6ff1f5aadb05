"""Traces of a few steps, for XProf (TensorBoard's profile plugin) and Perfetto."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax


class TraceWindow:
    """Traces steps ``first_step`` to ``first_step + steps - 1`` into a directory, and marks every step in the trace.

    ::

        window = TraceWindow("profile", first_step=10, steps=5)
        for number, batch in enumerate(engine.place(batches)):
            with window.step(number):
                state, output = step(state, batch)
        window.close()

    The files are those of ``jax.profiler.start_trace``: ``plugins/profile/<time>/*.xplane.pb``. In the first steps programs
    are compiled: leave them out.

    Args:
        directory: where the trace goes; each process writes its own files there.
        first_step: number of the first step that is traced.
        steps: how many are traced; 0 for none.
        perfetto: also write ``perfetto_trace.json.gz``, for https://ui.perfetto.dev.

    Raises:
        ValueError: a negative number of steps.
    """

    def __init__(self, directory: str | os.PathLike[str], first_step: int = 2, steps: int = 5, *, perfetto: bool = False) -> None:
        if first_step < 0 or steps < 0:
            raise ValueError(f"TraceWindow(first_step={first_step}, steps={steps}): expected numbers of at least 0")
        self.directory = os.fspath(directory)
        self.first_step = first_step
        self.end_step = first_step + steps
        self._perfetto = perfetto
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int, name: str = "train") -> Iterator[None]:
        """Run step ``number`` in the block: it is marked as ``name`` in the trace, which starts and ends where it is due."""
        if number == self.first_step < self.end_step and not self._tracing:
            _wait_for_devices()  # what was dispatched before is not part of the window
            jax.profiler.start_trace(self.directory, create_perfetto_trace=self._perfetto)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation(name, step_num=number):
            yield
        if number + 1 >= self.end_step:
            self.close()

    def close(self) -> None:
        """End the trace, if one is running, with what the devices still have to do."""
        if self._tracing:
            self._tracing = False
            _wait_for_devices()
            jax.profiler.stop_trace()


def _wait_for_devices() -> None:
    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])
