"""torchmetrics in a captured step: its calls are recorded and made on the host after the step, on the real metric objects.

States of metrics are no part of the program. A metric is brought up to date late, a few steps behind the device; whoever looks at
it in between brings it up to date first (:class:`torch_compat.functional.pending.PendingCalls`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torchmetrics import Metric, MetricCollection

from torch_compat.functional.deferred import Deferred
from torch_compat.functional.host_calls import HostCalls, is_traced

_METHODS = frozenset({"update", "compute", "reset", "forward"})
_OF_COLLECTIONS = _METHODS | {"_compute_groups_create_state_ref"}
_STATE = frozenset({"_update_count", "_computed", "_forward_cache", "update_count", "update_called", "metric_state"})


def metric_modules(module: torch.nn.Module) -> set[int]:
    """Identities of the metrics and metric collections in a module tree, and of everything inside them."""
    metrics = [found for found in module.modules() if isinstance(found, Metric | MetricCollection)]
    return {id(inner) for metric in metrics for inner in metric.modules()}


class MetricCalls:
    """Records what a captured step does with torchmetrics objects.

    Args:
        calls: where to.
    """

    def __init__(self, calls: HostCalls) -> None:
        self._calls = calls
        self._inside = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """While active, methods of metrics and collections are recorded instead of run."""
        own = {kind: kind.__dict__.get("__getattribute__") for kind in (Metric, MetricCollection)}
        Metric.__getattribute__ = self._reader(Metric, _METHODS)
        MetricCollection.__getattribute__ = self._reader(MetricCollection, _OF_COLLECTIONS)
        try:
            yield
        finally:
            for kind, before in own.items():
                if before is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = before

    def _reader(self, kind: type, methods: frozenset[str]) -> Callable[[Any, str], Any]:
        def read(metric: Any, name: str) -> Any:
            original = super(kind, metric).__getattribute__
            if self._inside:
                return original(name)
            if name in methods:
                return functools.partial(self._record, metric, name)
            if name in _STATE or (kind is Metric and name in original("__dict__").get("_defaults", ())):
                raise self._calls.refuse(
                    f"it reads {name!r}, a state of a {type(metric).__name__}, which is brought up to date after the step",
                    "read it in a hook such as on_train_batch_end, or use the metric's compute()",
                )
            return original(name)

        return read

    def _record(self, metric: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(metric).__name__}.{method}"
        like = self._example(metric, method, args, kwargs) if method in ("forward", "compute") else None
        place = self._calls.record(_call_method, (_Held(metric), method, *args), kwargs, text=name, state=_parts(metric))
        if method not in ("forward", "compute"):
            return None
        return unpacked(Deferred(self._calls, place, like=like))

    def step_value(self, metric: Metric) -> Deferred:
        """The value of the metric's last forward, at this point of the step."""
        place = self._calls.record(_last_value, (_Held(metric),), text="forward cache", state=_parts(metric))
        return Deferred(self._calls, place)

    def _example(self, metric: Any, method: str, args: Any, kwargs: Any) -> Any:
        """A result of the same structure: what a copy of the metric gives for zeros; None where that fails."""
        if any(type(leaf) is Deferred for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        self._inside = True
        try:
            with _disable_current_modes(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
                warnings.simplefilter("ignore")
                clone = copy.deepcopy(metric)
                return getattr(clone, method)(*_zeros(args), **_zeros(kwargs))
        except Exception:
            return None  # such as a check of the zeros' values: then only the type of the result is unknown
        finally:
            self._inside = False


class _Held:
    """Keeps a metric from being taken for a container of other things (a collection is a mapping of modules)."""

    __slots__ = ("metric",)

    def __init__(self, metric: Any) -> None:
        self.metric = metric


def _call_method(held: _Held, method: str, /, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        if method == "forward":
            return held.metric(*args, **kwargs)
        return getattr(held.metric, method)(*args, **kwargs)


def _last_value(held: _Held) -> Any:
    return held.metric._forward_cache


def _parts(metric: Any) -> tuple[Any, ...]:
    return tuple(part for part in metric.modules() if isinstance(part, Metric | MetricCollection))


def unpacked(value: Deferred) -> Any:
    """A deferred dict, list or tuple as such a container of deferred values."""
    like = value.example()
    if type(like) is dict:
        return {key: unpacked(value[key]) for key in like}
    if type(like) in (list, tuple):
        return type(like)(unpacked(value[index]) for index in range(len(like)))
    return value


def _zeros(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype) if is_traced(leaf) else leaf

    return pytree.tree_map(of, tree)
