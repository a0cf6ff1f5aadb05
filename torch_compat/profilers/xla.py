"""``XLAProfiler``: traces of what host and devices do, for XProf and Perfetto."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax

from torch_compat.profilers.profiler import Profiler
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn
from xlatrain.xla.profiling import TraceWindow

_STEPS = {"run_training_batch": "train", "validation_step": "validate", "test_step": "test", "predict_step": "predict"}


class XLAProfiler(Profiler):
    """Traces a window of steps with ``jax.profiler``, and marks every step and action in the trace.

    ::

        trainer = pl.Trainer(profiler=XLAProfiler(dirpath="trace", first_step=10, steps=5))

    Steps of all kinds are counted from 0, over the whole run. The trace is written to ``<dirpath>/plugins/profile/<time>/``: look
    at it with ``tensorboard --logdir <dirpath>`` (plugin ``xprof``), or with ``perfetto=True`` in https://ui.perfetto.dev.

    Args:
        port: a server listens there, from which XProf can capture at any time; None for no server. One server per process.
        dirpath: where traces are written; default: the directory of the first logger.
        first_step: the first step that is traced; the first ones are compiled.
        steps: how many steps are traced; 0 for none.
        perfetto: write a Perfetto trace too.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.profilers.XLAProfiler.html (``port``)
    """

    def __init__(
        self,
        port: int | None = 9012,
        dirpath: str | Path | None = None,
        first_step: int = 2,
        steps: int = 5,
        perfetto: bool = False,
    ) -> None:
        super().__init__(dirpath=dirpath)
        self.port = port
        TraceWindow("", first_step, steps)  # a wrong number is an error here
        self._options: dict[str, Any] = {"first_step": first_step, "steps": steps, "perfetto": perfetto}
        self._window: TraceWindow | None = None
        self._count = 0
        self._open: list[tuple[str, contextlib.ExitStack]] = []

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        super().setup(stage, local_rank, log_dir)
        self._count = 0
        self._window = TraceWindow(os.fspath(self.dirpath or os.getcwd()), **self._options)
        _start_server(self.port)

    def start(self, action_name: str) -> None:
        stack = contextlib.ExitStack()
        kind = _STEPS.get(action_name.rpartition(".")[2])
        if kind is not None and self._window is not None:
            stack.enter_context(self._window.step(self._count, kind))
            self._count += 1
        else:
            stack.enter_context(jax.profiler.TraceAnnotation(action_name))
        self._open.append((action_name, stack))

    def stop(self, action_name: str) -> None:
        for index in reversed(range(len(self._open))):
            if self._open[index][0] == action_name:
                self._open.pop(index)[1].close()
                return
        raise ValueError(f"Attempting to stop recording an action ({action_name}) which was never started: call start() first")

    def teardown(self, stage: str | None) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
            if self._count <= self._options["first_step"] and self._options["steps"]:
                rank_zero_warn(
                    f"XLAProfiler(first_step={self._options['first_step']}): nothing was traced, the run had {self._count} steps."
                )


_servers: dict[int, Any] = {}  # jax keeps a server for as long as its object lives


def _start_server(port: int | None) -> None:
    if port is None or port in _servers:
        return
    if _servers:
        rank_zero_warn(f"XLAProfiler(port={port}): this process has its one profiler server at port {next(iter(_servers))}")
        return
    try:
        _servers[port] = jax.profiler.start_server(port)
        rank_zero_info(f"XProf can capture from this process at port {port} (`XLAProfiler(port=None)` for no server).")
    except Exception as error:  # the port is taken: traces are written all the same
        rank_zero_warn(f"XLAProfiler(port={port}): no profiler server was started: {error}")
