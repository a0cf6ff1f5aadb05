"""The circumstances of a run: what its steps depend on that no guard compares, since it stays as it is throughout a run."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import jax
import torch
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from torch_compat.step.guards.origins import is_house
from torch_compat.step.kept_graphs import settings
from torch_compat.step.run_context import RunContext
from torch_compat.step.values.marks import Same, contents, mark
from xlatrain.bridge.jax_function import CallsJax
from xlatrain.bridge.tensors.strides import strides_of

_OF_ONE_RUN = frozenset(
    {"executor", "run_time", "transfer", "_claims", "_announced", "datamodule", "run_datamodule", "callbacks"}
    | {"lr_scheduler_configs", "should_stop", "received_sigterm", "preemption", "_fit_number"}
    | {"_ckpt_path", "_manages_ckpt_path", "_found_ckpt_path"}
)
"""Attributes of a run that each run makes anew; data module and callbacks are among the roots."""
_BY_CLASS = frozenset({"_loggers", "profiler"})
"""Those of whose values steps see nothing, unless they ask their run."""
_DEEP = 4


class Circumstances:
    """Everything that steps depend on and no guard compares, since it is the same throughout a run.

    That is: the settings of Trainer and strategy; their plugins, callbacks and data module; the module's tensors, with their
    shapes, strides and dtypes, and the classes of its parts; the settings of the process. Of callbacks, of the data
    module and of our own objects only the classes count, so that another Trainer with the same settings is as good: a step that
    asks for more belongs to one Trainer (:meth:`of_same_objects`).

    Args:
        run: as it begins, or at its end.
        roots: of its steps.

    Attributes:
        leaving: names of the callbacks and the data module among the roots, in whose place another Trainer has its own.
    """

    def __init__(self, run: RunContext, roots: Mapping[str, Any]) -> None:
        strategy, module = run.strategy, run.lightning_module
        self.leaving = [name for name in roots if name.startswith(("trainer.callbacks[", "trainer.datamodule"))]
        self._roots = {name: type(one) if name in self.leaving else one for name, one in roots.items()}
        self._objects = [weakref.ref(one) for one in (run, *(roots[name] for name in self.leaving))]
        self._process = _process()
        self._mesh, self._rules = strategy.mesh, strategy.sharding_rules(module)
        self._kinds = {path: (child, type(child)) for path, child in module.named_modules(remove_duplicate=False)}
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._tensors = {name: (one, tuple(one.shape), one.dtype, one.layout, strides_of(one)) for name, one in tensors}
        settings = {name: value for name, value in vars(run).items() if name not in _OF_ONE_RUN}
        classes = [type(one) for name in _BY_CLASS for one in _listed(settings.pop(name, None))]
        plugins = (strategy, run.precision_plugin, getattr(strategy, "accelerator", None))
        self._settings = (
            _facts(settings),
            tuple(classes),
            *((type(one), _facts(getattr(one, "__dict__", {}))) for one in plugins),
        )
        self._classes = [type(one) for one in roots.values()]

    def same_as(self, other: Circumstances) -> bool:
        """Whether nothing has changed."""
        return (
            self._process == other._process
            and self._mesh is other._mesh
            and self._rules == other._rules
            and list(self._roots) == list(other._roots)
            and all(map(operator.is_, self._roots.values(), other._roots.values()))
            and self._classes == other._classes
            and _same_pairs(self._kinds, other._kinds)
            and _same_pairs(self._tensors, other._tensors)
            and self._settings == other._settings
        )

    def of_same_objects(self, other: Circumstances) -> bool:
        """Whether they are those of one Trainer with the same callbacks."""
        return all(map(operator.is_, (one() for one in self._objects), (one() for one in other._objects)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _facts(value: Any, depth: int = 0) -> Hashable:
    """The part of a setting that counts: numbers and texts, the class of an object of ours, which object another is."""
    kind = type(value)
    if is_house(kind.__module__):
        return kind
    if depth < _DEEP and isinstance(value, dict):
        return (kind, tuple((mark(key), _facts(one, depth + 1)) for key, one in value.items()))
    if depth < _DEEP and isinstance(value, list | tuple):
        return (kind, tuple(_facts(one, depth + 1) for one in value))
    if isinstance(value, dict | list | set):
        return (Same(value), contents(value))
    return mark(value)


def _same_pairs(before: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether both have the same objects under the same names, in the same order, and the rest of each is equal."""
    return list(before) == list(now) and all(
        one[0] is two[0] and one[1:] == two[1:] for one, two in zip(before.values(), now.values(), strict=True)
    )


def may_be_kept(run: RunContext) -> bool:
    """Whether the circumstances of a run say all: one process, plugins of ours, no JAX or lazy modules, no modes of torch."""
    module = run.lightning_module
    plugins = (run.strategy, run.precision_plugin, getattr(run.strategy, "accelerator", None))
    return (
        jax.process_count() == 1
        and _get_current_function_mode() is None
        and _get_current_dispatch_mode() is None
        and all(one is None or type(one).__module__.startswith("torch_compat.") for one in plugins)
        and not any(isinstance(child, CallsJax) for child in module.modules())
        and not any(map(is_lazy, itertools.chain(module.parameters(), module.buffers())))
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
