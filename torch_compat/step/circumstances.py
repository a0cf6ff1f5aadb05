"""The circumstances of a run: what its steps depend on that no guard compares, since it stays as it is throughout a run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_compat.step.kept_graphs import settings
from torch_compat.step.run_context import RunContext
from torch_compat.step.values.marks import holds_the_same
from xlatrain.bridge.jax_function import CallsJax

_OF_ONE_RUN = frozenset({"executor", "run_time", "transfer", "_claims", "_announced", "datamodule", "run_datamodule"})
"""Attributes of a run that each run makes anew; a data module is among the roots."""


class Circumstances:
    """Everything that steps depend on and no guard compares, since it is the same throughout a run.

    That is: the settings of Trainer and strategy; their plugins, callbacks and data module; the module's tensors, with their
    shapes and dtypes, and the classes of its parts; the settings of the process.

    Args:
        run: as it begins, or at its end.
        roots: of its steps.
    """

    def __init__(self, run: RunContext, roots: Mapping[str, Any]) -> None:
        strategy, module = run.strategy, run.lightning_module
        self._roots = dict(roots)
        self._process = _process()
        self._mesh, self._rules = strategy.mesh, strategy.sharding_rules(module)
        self._kinds = {path: (child, type(child)) for path, child in module.named_modules(remove_duplicate=False)}
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._tensors = {name: (one, tuple(one.shape), one.dtype, one.layout) for name, one in tensors}
        settings = {name: value for name, value in vars(run).items() if name not in _OF_ONE_RUN}
        owners = [strategy, run.precision_plugin, getattr(strategy, "accelerator", None), *roots.values()]
        self._owners = [(one, type(one)) for one in owners]
        self._held = [settings, *(dict(vars(one)) for one in owners[:3] if hasattr(one, "__dict__"))]
        self._held += [value.copy() for held in self._held for value in held.values() if isinstance(value, list | dict | set)]

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether they are those of a run of this module."""
        return self._roots["self"] is module

    def same_as(self, other: Circumstances) -> bool:
        """Whether nothing has changed."""
        return (
            self._process == other._process
            and self._mesh is other._mesh
            and self._rules == other._rules
            and self._roots.keys() == other._roots.keys()
            and all(self._roots[name] is other._roots[name] for name in self._roots)
            and _same_pairs(self._kinds, other._kinds)
            and _same_pairs(self._tensors, other._tensors)
            and len(self._owners) == len(other._owners)
            and all(a is b and kind is of for (a, kind), (b, of) in zip(self._owners, other._owners, strict=True))
            and len(self._held) == len(other._held)
            and all(map(holds_the_same, other._held, self._held))
        )


def _same_pairs(before: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether both have the same objects under the same names, in the same order, and the rest of each is equal."""
    return list(before) == list(now) and all(
        one[0] is two[0] and one[1:] == two[1:] for one, two in zip(before.values(), now.values(), strict=True)
    )


def may_be_kept(run: RunContext) -> bool:
    """Whether the circumstances of a run say all: one process, plugins of ours, no JAX modules, no modes of torch."""
    plugins = (run.strategy, run.precision_plugin, getattr(run.strategy, "accelerator", None))
    return (
        jax.process_count() == 1
        and _get_current_function_mode() is None
        and _get_current_dispatch_mode() is None
        and all(one is None or type(one).__module__.startswith("torch_compat.") for one in plugins)
        and not any(isinstance(child, CallsJax) for child in run.lightning_module.modules())
    )


def _process() -> Hashable:
    """The settings of the process by which equal code may compute something else."""
    return (settings(), *_flags())


def _flags() -> Iterator[Hashable]:
    yield torch.get_default_device()
    yield torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    yield torch.is_inference_mode_enabled()
    yield torch.is_grad_enabled()
    yield torch.is_anomaly_enabled()
    yield torch.is_autocast_cache_enabled()
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device)
        yield torch.get_autocast_dtype(device)
    yield torch.backends.mha.get_fastpath_enabled()
    yield torch.backends.mkldnn.enabled  # pyright: ignore[reportAttributeAccessIssue]
    yield torch.backends.cuda.flash_sdp_enabled()
    yield torch.backends.cuda.math_sdp_enabled()
    yield torch.backends.cuda.mem_efficient_sdp_enabled()
