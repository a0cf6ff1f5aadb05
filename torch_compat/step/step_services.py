"""Services of a strategy for compiled steps, the Trainer's and Fabric's: arrays on its mesh, and the context of a capture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from jax.sharding import Mesh

from torch_compat.run.report import ExecutorLog
from torch_compat.step.capture.step_capture import TraceContext
from torch_compat.step.kept_graphs import RunGraphs
from torch_compat.step.kept_steps import KeptSteps
from torch_compat.step.model_state import ModelState
from torch_compat.step.run_context import StepStrategy
from xlatrain.bridge.jax_function import CallsJax
from xlatrain.cluster.distributed import world
from xlatrain.cluster.launch import ELASTIC
from xlatrain.mesh.mesh import platform
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.mesh.sharding.rules import literal


@dataclass(frozen=True)
class StepServices:
    """The services that steps need of their strategy.

    Attributes:
        roots: name → object whose Python side effects are followed (module, callbacks, datamodule).
        trace: the context of the user's Python during a capture.
        compiling: told True while a program is made, False afterwards.
        backward: the strategy's own backward, captured with the training step (see :class:`StepInputs`).
        around_backward: the context of the backward pass of a captured training step.
        graphs: of the module's steps in earlier runs; None: every run captures its own.
        no_recompilation_after: training batches after which another compilation is an error; None: never.
        kept: the steps of an earlier run of the module, where nothing else has changed; they are taken over.
        log: what the run report says of the steps.
    """

    roots: Mapping[str, Any]
    trace: TraceContext
    compiling: Callable[[bool], None]
    backward: Callable[[torch.Tensor, Callable[..., None]], Any] | None = None
    around_backward: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    no_recompilation_after: int | None = None
    graphs: RunGraphs | None = None
    kept: KeptSteps | None = None
    log: ExecutorLog = field(default_factory=ExecutorLog)


def place_model(
    strategy: StepStrategy,
    module: torch.nn.Module,
    kind: type[ModelState] = ModelState,
    beside: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
) -> ModelState:
    """The module's arrays on the strategy's mesh, split as it says, with those ``beside`` it; all processes call this."""
    seed = strategy.broadcast(torch.initial_seed())
    rules = with_annotations(strategy.sharding_rules(module), module)
    strategy.placed = kind(module, strategy.mesh, rules, seed, beside)
    return strategy.placed


def draws_by_torch(mesh: Mesh) -> bool:
    """Whether torch draws the random numbers of steps on the host, as stock Lightning does: in one process, on one CPU device.

    Elsewhere stock draws from the generators of its devices, which are not here, or each process draws for its own rows. An
    elastic run that has one process left goes on with the numbers that it had.
    """
    alone = mesh.devices.size == 1 and world().process_count == 1 and ELASTIC not in os.environ
    return alone and platform(mesh) == "cpu"


def with_annotations(rules: ShardingRules, module: torch.nn.Module) -> ShardingRules:
    """``rules``, and after those that the user gave by path the shardings that ``nnx`` modules give their own parameters."""
    own = tuple(
        (literal(f"{path}.{name}" if path else name), spec)
        for path, child in module.named_modules()
        if isinstance(child, CallsJax)
        for name, spec in child.annotations().items()
    )
    return replace(rules, by_path=(*rules.by_path, *own)) if own else rules
