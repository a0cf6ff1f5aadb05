"""Fallback from compiled steps to eager ones: whether that is wanted, and what has to come from the mesh to the host first."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torch_compat.run.states import RunningStage
from torch_compat.step.eager.device import eager_device, note
from torch_compat.step.metrics.sync import gather_states
from torch_compat.step.model_state import ModelState
from torch_compat.step.run_context import StepStrategy
from torch_compat.step.step_services import place_model
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.host_arrays import to_torch
from torch_compat.utilities.metric_types import is_metric
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.tensors.strides import overlap
from xlatrain.cluster.distributed import world

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from torchmetrics import Metric


def executor_choice() -> str:
    """``XLATRAIN_EXECUTOR``: ``auto`` (compiled, eager where that is impossible), ``compiled`` or ``eager``.

    Raises:
        MisconfigurationException: another value.
    """
    choice = os.environ.get("XLATRAIN_EXECUTOR", "auto")
    if choice not in ("auto", "compiled", "eager"):
        raise MisconfigurationException(f"XLATRAIN_EXECUTOR={choice!r}; expected 'auto', 'compiled' or 'eager'")
    return choice


def must_fall_back(wanted: str, reason: str, mesh: Mesh) -> None:
    """Say once that steps run eagerly; an error where that was forbidden.

    Raises:
        MisconfigurationException: only compiled steps are wanted.
    """
    if wanted == "compiled":
        raise MisconfigurationException(f"XLATRAIN_EXECUTOR=compiled, but the step cannot be compiled: {reason}")
    kind = "CPU" if eager_device(mesh).type == "cpu" else "GPU"
    where = f"one {kind}" if world().process_count == 1 else f"one {kind} of each process, the whole batch on every one"
    rank_zero_warn(f"Steps run eagerly on {where}, not compiled over the mesh. {note(mesh)}{reason}")


def why_eager(module: torch.nn.Module, mesh: Mesh, *, detects_anomalies: bool) -> str | None:
    """The reason why the steps of a module are eager whatever they do, which is said; None where they are compiled.

    Args:
        module: its steps.
        mesh: on which they would run.
        detects_anomalies: each op's gradients are looked at.

    Raises:
        MisconfigurationException: only compiled steps are wanted.
    """
    wanted = executor_choice()
    if wanted == "eager":
        return "XLATRAIN_EXECUTOR=eager"
    if detects_anomalies and wanted == "auto":
        reason: str | None = "detect_anomaly=True: operations are checked one by one, in plain torch"
    else:
        reason = _scripted_part(module) or _uninitialized_part(module) or of_one_memory(module.named_parameters())
    if reason is not None:
        must_fall_back(wanted, reason, mesh)
    return reason


def _scripted_part(module: torch.nn.Module) -> str | None:
    """Why a module that has TorchScript in it is not compiled; None for any other.

    Raises:
        MisconfigurationException: there are several processes, which begin by sharing weights that TorchScript keeps to itself.
    """
    name = next((name for name, child in module.named_modules() if isinstance(child, torch.jit.ScriptModule)), None)
    if name is None:
        return None
    reason = (
        f"self.{name} is a TorchScript module (torch.jit.script or torch.jit.trace): it runs outside of Python, where it cannot "
        "be captured.\n  Fix: train the plain module, and script it after fit"
    )
    if world().process_count > 1:
        raise MisconfigurationException(f"{reason}. On several processes it cannot be trained at all")
    return reason


def uninitialized(module: torch.nn.Module) -> str | None:
    """The name of a parameter or buffer that the first batch makes (``nn.LazyLinear``); None where there is none."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    return next((name for name, one in named if isinstance(one, UninitializedBuffer | UninitializedParameter)), None)


def _uninitialized_part(module: torch.nn.Module) -> str | None:
    """Why steps begin eagerly where layers get their shapes from the first batch. On several processes that is an error later."""
    name = uninitialized(module) if world().process_count == 1 else None
    if name is None:
        return None
    return (
        f"self.{name} is made by the first batch (a Lazy module).\n  Fix: run a batch through the module in configure_model or "
        "setup()"
    )


def of_one_memory(named: Iterable[tuple[str, torch.nn.Parameter]]) -> str | None:
    """Why parameters that show the same memory are not compiled: an update of one is one of the other. None for any others."""
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, one in named:
        if type(one) is not torch.nn.Parameter or one.device.type != "cpu" or one.layout != torch.strided:
            continue  # on the mesh, or made there later
        there = seen.setdefault(one.untyped_storage()._cdata, [])
        if (other := next((other for other, held in there if overlap(held, one)), None)) is not None:
            return (
                f"the parameters {other} and {name} show the same memory (as one.weight.data = other.weight.data makes them), "
                "which arrays on a mesh do not.\n  Fix: make them one parameter, one.weight = other.weight"
            )
        there.append((name, one))
    return None


def bring_home(model: ModelState | None, release: Callable[[], object], reason: str) -> None:
    """Take the state on the mesh into this process's memory, if there is any. Collective.

    Args:
        model: what is on the mesh.
        release: gives the module and its optimizers host tensors.
        reason: why steps become eager.

    Raises:
        MisconfigurationException: there is too little memory.
    """
    if model is None:
        return
    if not model.fits_host():
        raise MisconfigurationException(
            f"{reason}\nThe step would run eagerly, which takes the whole model and its optimizer's state into the memory of "
            "each process, but this model was made on its shards and does not fit there. Make the step compilable, or run on "
            "hosts with more memory"
        )
    with_gradients(model, release)


def with_gradients(model: ModelState, release: Callable[[], object]) -> None:
    """Call ``release``, which gives the module host tensors; they have the gradients that they had on the mesh."""
    accumulated = {name: to_torch(grad) for name, grad in model.state.accumulated.items()}
    release()
    for name, grad in accumulated.items():
        model.params[name].grad = grad


def share_values(strategy: StepStrategy, module: torch.nn.Module, reason: str, kind: type[ModelState] = ModelState) -> None:
    """Give the module the values that it would have on the mesh: process 0's, or those of its constructor's tape. Collective.

    Args:
        reason: why steps run eagerly, for :func:`bring_home`.
        kind: of the module's arrays.
    """
    model = place_model(strategy, module, kind)
    bring_home(model, lambda: model.release(to_host=True), reason)
    strategy.placed = None


_CONCERNED = {
    RunningStage.TRAINING: {"training_step"},
    RunningStage.SANITY_CHECKING: {"validation_step"},
    RunningStage.VALIDATING: {"validation_step", "training_step"},
    RunningStage.TESTING: {"test_step"},
    RunningStage.PREDICTING: set(),  # predictions are of a process's own rows either way
}
"""Steps whose values of this epoch may still be looked at."""


def share_rows(kept: Collection[str], roots: Mapping[str, Any], stage: RunningStage | None, reason: str) -> None:
    """Make the host's values of this process's rows those of all processes, as eager steps have them. Collective.

    Args:
        kept: methods whose compiled steps of this epoch left values of rows on the host.
        roots: where metrics are looked for.
        stage: which loop runs.
        reason: why steps become eager.

    Raises:
        MisconfigurationException: lists, attributes or hooks have such values.
    """
    concerned = _CONCERNED[RunningStage.TRAINING if stage is None else stage].intersection(kept)
    if concerned:
        raise MisconfigurationException(
            f"{reason}\nOn several processes it is too late to go on eagerly: {' and '.join(sorted(concerned))} has run "
            "compiled batches in this epoch. Lists, attributes or hooks have this process's rows of them, but eager steps give "
            "the whole batch. Set XLATRAIN_EXECUTOR=eager, so that the run is eager from its beginning, or make the step "
            "compilable"
        )
    seen: set[int] = set()
    for root in roots.values():
        for metric in _metrics(root, seen, 0):
            gather_states(metric)


def _metrics(value: Any, seen: set[int], depth: int) -> Iterator[Metric]:
    """The metrics in an object, its containers and its submodules; the same order on every process."""
    if id(value) in seen or depth > 4:
        return
    if isinstance(value, torch.nn.Module):
        for module in value.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield from [module] if is_metric(module) else _in_attributes(module, seen, depth)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _metrics(item, seen, depth + 1)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _metrics(item, seen, depth + 1)
    elif depth == 0:
        yield from _in_attributes(value, seen, depth)


def _in_attributes(owner: Any, seen: set[int], depth: int) -> Iterator[Metric]:
    for name, item in vars(owner).items():
        if not name.startswith("_"):
            yield from _metrics(item, seen, depth + 1)
