"""Tensor-parallel plans of torch and ``transformers``, resolved to the parameters of a module.

A plan says for modules how their weights are split: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html,
https://huggingface.co/docs/transformers/perf_infer_gpu_multi. Where activations are split follows from that: XLA's partitioner
decides, so the parts of a plan that are about activations alone split nothing here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from xlatrain.mesh.sharding import PlannedSplit

_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise")
_EMBEDDING = {"embedding_rowwise": 0, "embedding_colwise": 1}
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "sequence_parallel", "local_params")
_ABOUT_ACTIVATIONS = ("moe_tp_experts", "moe_identity_expert", "all_reduce")
_TORCH = {"ColwiseParallel": "colwise", "RowwiseParallel": "rowwise", "SequenceParallel": "sequence_parallel"}

STYLES = (*_COLUMNS, *_ROWS, *_EMBEDDING, *_WHOLE, *_ABOUT_ACTIVATIONS)
"""The styles that a plan may name."""


def planned_splits(module: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, PlannedSplit]:
    """A plan given by the user, as it applies to ``module``.

    Args:
        plan: path of a module or parameter below ``module``, ``*`` for one part of it (``"model.layers.*.mlp.up_proj"``) →
            a style's name (:data:`STYLES`), or torch's ``ColwiseParallel()``, ``RowwiseParallel()``, ``SequenceParallel()``.

    Raises:
        ValueError: a style that is not known, or an entry that matches no parameter; all of them in one error.
    """
    found = _resolve(module, "", plan, "given")
    problems = []
    paths = [name for name, _ in module.named_modules() if name] + [name for name, _ in module.named_parameters()]
    for key, style in plan.items():
        name, matched = style_name(style), [path for path in paths if _matches(key, path)]
        if name not in STYLES:
            problems.append(f"{key!r} → {name!r}: unknown style")
        elif not matched:
            near = difflib.get_close_matches(key, paths, n=1)
            problems.append(f"{key!r} matches no module or parameter{f' (did you mean {near[0]!r}?)' if near else ''}")
        elif name in (*_COLUMNS, *_ROWS) and not _owns(module, matched):
            problems.append(f"{key!r} → {name!r}: {matched[0]!r} has no parameters of its own")
    if problems:
        unknown = any(style_name(style) not in STYLES for style in plan.values())
        known = f". Known styles: {', '.join(STYLES)}, or torch's {', '.join(_TORCH)}" if unknown else ""
        raise ValueError(
            f"tensor-parallel plan for {type(module).__name__}: {'; '.join(problems)}{known}. Paths are those of named_modules()"
            f"{f', e.g. {paths[min(2, len(paths) - 1)]!r}' if paths else ''}; '*' stands for one part"
        )
    return found


def _owns(module: torch.nn.Module, paths: Sequence[str]) -> bool:
    """Whether one of these is a parameter, or a module with parameters of its own."""
    modules = dict(module.named_modules())
    return any(path not in modules or next(modules[path].parameters(recurse=False), None) is not None for path in paths)


def own_plan(module: torch.nn.Module) -> dict[str, PlannedSplit]:
    """The plan that the ``transformers`` models in ``module`` bring along: ``model.tp_plan``, made of ``base_model_tp_plan``."""
    found: dict[str, PlannedSplit] = {}
    outer: list[str] = []
    for prefix, child in module.named_modules():
        plan = getattr(child, "tp_plan", None)
        if not isinstance(plan, Mapping) or any(f"{prefix}.".startswith(name) for name in outer):
            continue  # the plan of an outer model has those of the inner ones
        outer.append(f"{prefix}." if prefix else "")
        found |= _resolve(child, f"{prefix}." if prefix else "", plan, type(child).__name__)
    return found


def split_of(owner: torch.nn.Module, param: torch.Tensor, style: str) -> int | None:
    """The dim of a parameter of ``owner`` that a style splits (a name of :data:`STYLES`, or of a class of torch); None: none."""
    return _dim(owner, param, _TORCH.get(style, style))


def _resolve(module: torch.nn.Module, prefix: str, plan: Mapping[str, Any], source: str) -> dict[str, PlannedSplit]:
    """The split of each parameter, by the entry that names it most closely: itself, then the module that has it."""
    found: dict[str, PlannedSplit] = {}
    for owner_name, owner in module.named_modules(remove_duplicate=False):
        for name, param in owner.named_parameters(recurse=False):
            path = f"{owner_name}.{name}" if owner_name else name
            key = _entry_for(plan, path) or _entry_for(plan, owner_name)
            style = None if key is None else style_name(plan[key])
            if style is None or style not in STYLES or style in _ABOUT_ACTIVATIONS:
                continue
            found[prefix + path] = PlannedSplit(_dim(owner, param, style), f"{source} {key!r} {style}")
    return found


def _entry_for(plan: Mapping[str, Any], path: str) -> str | None:
    return next((key for key in plan if path and _matches(key, path)), None)


def _matches(key: str, path: str) -> bool:
    return re.fullmatch(re.escape(key).replace(r"\*", r"[^.]+"), path) is not None


def style_name(style: Any) -> str:
    """A style of a plan by its name: torch's objects have one too."""
    return style if isinstance(style, str) else _TORCH.get(type(style).__name__, type(style).__name__)


def _dim(owner: torch.nn.Module, param: torch.Tensor, style: str) -> int | None:
    """The dim of a parameter that a style splits. ``Linear`` has weights ``[out, in]``, experts stacked ones ``[…, out, in]``."""
    if style in _WHOLE or param.ndim == 0:
        return None
    if style in _EMBEDDING:
        return _EMBEDDING[style]
    if isinstance(owner, torch.nn.Embedding):
        return 1 if style in _COLUMNS else 0
    if param.ndim == 1:
        return 0 if style in _COLUMNS else None
    columns, rows = (-1, -2) if type(owner).__name__ == "Conv1D" else (-2, -1)
    return columns if style in _COLUMNS else rows
