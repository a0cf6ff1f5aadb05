"""torchmetrics in a captured step: its calls are recorded and made on the host after the step, on the real metric objects.

A metric that the step itself makes (``self.a + self.b`` too) is a local value of it: its methods are traced as all functions are.
States of metrics are no part of the program. A metric is brought up to date late, a few steps behind the device; whoever looks at
it in between brings it up to date first (:class:`torch_compat.step.host.callback_queue.PendingCalls`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.abc
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torch_compat.step.host.batch_texts import plain
from torch_compat.step.host.calls import HostCalls, is_traced
from torch_compat.step.host.host_future import HostFuture
from torch_compat.step.metrics.functions import traceable_metric_functions
from torch_compat.step.metrics.sync import counted_once, is_per_row, synchronized_steps
from torch_compat.step.values.generators import torch_generator_kept
from torch_compat.utilities.metric_types import is_metric, is_metric_or_collection, torchmetrics_if_imported
from xlatrain.bridge.capture.masked_rows.masked_rows import MaskedRows
from xlatrain.bridge.errors import BridgeError
from xlatrain.bridge.patches import patched
from xlatrain.cluster.distributed import world

if TYPE_CHECKING:
    from torchmetrics import Metric

_METHODS = frozenset({"update", "compute", "reset", "forward"})
_OF_COLLECTIONS = _METHODS | {"_compute_groups_create_state_ref"}
_CHECKS = (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError)
"""What metrics raise for values that they do not like, besides an error of their own."""
_STATE = frozenset({"_update_count", "_computed", "_forward_cache", "update_count", "update_called", "metric_state"})


class MetricsImportedError(BaseException):  # the import stands in the user's code, often in a try that expects it to fail
    """A step imports torchmetrics, for the first time: it must be imported before the step is captured."""


class _Refusing(importlib.abc.MetaPathFinder):
    asked = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "torchmetrics":
            self.asked = True
            raise MetricsImportedError


@contextlib.contextmanager
def _no_import_of_torchmetrics() -> Iterator[None]:
    finder = _Refusing()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
    if finder.asked:  # user code has caught the error of the import
        raise MetricsImportedError


def metric_modules(module: torch.nn.Module) -> set[int]:
    """Identities of the metrics and metric collections in a module tree, and of everything inside them."""
    metrics = [found for found in module.modules() if is_metric_or_collection(found)]
    return {id(inner) for metric in metrics for inner in metric.modules()}


class MetricCalls:
    """Records what a captured step does with torchmetrics objects.

    Args:
        calls: the recorder of the capture's host calls.
    """

    def __init__(self, calls: HostCalls) -> None:
        self._calls = calls
        self._inside = False
        self._forwards: list[tuple[_MetricCall, int]] = []
        self._made: dict[int, Any] = {}  # by the step itself

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record methods of metrics and collections in the block, instead of running them.

        Raises:
            MetricsImportedError: torchmetrics is imported meanwhile: then what happens here is not to be used.
        """
        if torchmetrics_if_imported() is None:
            with _no_import_of_torchmetrics():
                yield
            return
        from torchmetrics import Metric, MetricCollection

        patches = (
            (Metric, "__getattribute__", self._reader(Metric, _METHODS)),
            (Metric, "__hash__", lambda metric: id(metric)),  # torchmetrics' reads the states, and module.modules() hashes
            (Metric, "__init__", self._maker(Metric.__init__)),
            (Metric, "__getstate__", self._copier(Metric.__getstate__)),
            (MetricCollection, "__init__", self._maker(MetricCollection.__init__)),
            (MetricCollection, "__getattribute__", self._reader(MetricCollection, _OF_COLLECTIONS)),
        )
        with patched(patches), traceable_metric_functions():
            yield

    def _reader(self, kind: type, methods: frozenset[str]) -> Callable[[Any, str], Any]:
        def read(metric: Any, name: str) -> Any:
            original = super(kind, metric).__getattribute__
            if self._inside or id(metric) in self._made:
                return original(name)
            if name in methods:
                return functools.partial(self._record, metric, name)
            if name in _STATE or (methods is _METHODS and name in original("__dict__").get("_defaults", ())):
                raise self._refused(
                    f"it reads {name!r}, a state of a {type(metric).__name__}",
                    "read it in a hook such as on_train_batch_end, or use the metric's compute()",
                )
            return original(name)

        return read

    def _maker(self, init: Any) -> Callable[..., None]:
        @functools.wraps(init)
        def make(metric: Any, *args: Any, **kwargs: Any) -> None:
            if not self._inside:
                self._made[id(metric)] = metric
            init(metric, *args, **kwargs)

        return make

    def _copier(self, getstate: Any) -> Callable[[Any], Any]:
        def copied(metric: Any) -> Any:
            if not self._inside and id(metric) not in self._made:
                what = f"it copies the state of a {type(metric).__name__}"
                raise self._refused(what, "copy it in a hook such as on_train_batch_end")
            return getstate(metric)

        return copied

    def _refused(self, why: str, fix: str) -> Exception:
        return self._calls.refuse(f"{why}, which is brought up to date after the step", fix)

    def _record(self, metric: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
        name = f"{type(metric).__name__}.{method}"
        gives_value = method in ("forward", "compute")
        like = self._example(metric, method, args, kwargs) if gives_value else None
        call = _MetricCall(metric, method)
        place = self._calls.record(call, args, kwargs, text=name, state=_parts(metric))
        if method == "forward":
            self._forwards.append((call, place.index))
        later = functools.cache(functools.partial(self._in_graph, metric, args, kwargs)) if method == "forward" else None
        return unpacked(HostFuture(self._calls, place, like=like, later=later)) if gives_value else None

    def _in_graph(self, metric: Any, args: Any, kwargs: Any) -> Any:
        """The value of a forward for a step that computes with it: that of a copy which has seen nothing else.

        None where it cannot be computed in the graph. The metric itself is called on the host, as ever.
        """
        if any(type(leaf) is HostFuture for leaf in pytree.tree_leaves((args, kwargs))) or any(True for _ in metric.parameters()):
            return None
        self._inside = True
        try:
            held = [one for part in metric.modules() for one in (*part._buffers.values(), *vars(part).values())]
            same = {id(one): one for one in held if isinstance(one, torch.Tensor)}  # seen by guards, which a copy is not
            with _disable_current_modes():
                clone = copy.deepcopy(metric, same)
            for part in filter(is_metric, clone.modules()):
                part._defaults = {name: _made_anew(value) for name, value in part._defaults.items()}
                part.reset()
            return clone(*args, **kwargs)
        except (*_CHECKS, BridgeError):
            return None
        finally:
            self._inside = False

    def step_value(self, metric: Metric, *, used: bool) -> HostFuture:
        """The value of the metric's last forward, at this point of the step; whether it is ``used``, rather than the epoch's."""
        if id(metric) in self._made:
            fix = "make it in __init__, or log its value"
            raise self._calls.refuse(f"it logs a {type(metric).__name__} that it makes itself", fix)
        if used:
            for call, _ in self._forwards:
                call.value_is_used = call.value_is_used or metric in call.parts
        call = _MetricCall(metric, "_forward_cache")
        return HostFuture(self._calls, self._calls.record(call, text=f"{type(metric).__name__} logged", state=_parts(metric)))

    def finish(self, used: Collection[int]) -> None:
        """Tell forwards whether anything uses their values: ``used`` has the indices of the results that something does."""
        for call, index in self._forwards:
            call.value_is_used = call.value_is_used or index in used

    def _example(self, metric: Any, method: str, args: Any, kwargs: Any) -> Any:
        """A result of the same structure: what a copy of the metric gives for zeros; None where that fails."""
        if any(type(leaf) is HostFuture for leaf in pytree.tree_leaves((args, kwargs))):
            return None
        from torchmetrics.utilities.exceptions import TorchMetricsUserError

        self._inside = True
        try:
            with _disable_current_modes(), warnings.catch_warnings(), torch_generator_kept(), torch.no_grad():
                warnings.simplefilter("ignore")
                clone = copy.deepcopy(metric)
                return getattr(clone, method)(*_zeros(args), **_zeros(kwargs))
        except (*_CHECKS, TorchMetricsUserError):
            return None  # such as a check of the zeros' values: then only the type of the result is unknown
        finally:
            self._inside = False


class _MetricCall:
    """A method of a metric or collection, to be called on the host.

    Attributes:
        parts: the metrics in the metric or collection, itself included.
        value_is_used: whether the value of a forward is used; on several processes it is then the global batch's.
    """

    def __init__(self, metric: Any, method: str) -> None:
        self._metric = metric
        self._method = method
        self.parts = [part for part in metric.modules() if is_metric(part)]
        self.value_is_used = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._method == "_forward_cache":
            return self._metric._forward_cache
        with torch.no_grad(), self._on_processes(args, kwargs) if world().process_count > 1 else contextlib.nullcontext():
            return (
                self._metric(*args, **kwargs)
                if self._method == "forward"
                else getattr(self._metric, self._method)(*args, **kwargs)
            )

    @contextlib.contextmanager
    def _on_processes(self, args: Any, kwargs: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._method in ("forward", "update") and not is_per_row((args, kwargs)):
                stack.enter_context(counted_once(self.parts))
            elif self._method == "forward" and self.value_is_used:
                stack.enter_context(synchronized_steps(self.parts))
            yield


def _parts(metric: Any) -> tuple[Any, ...]:
    return tuple(part for part in metric.modules() if is_metric_or_collection(part))


def unpacked(value: HostFuture) -> Any:
    """A deferred dict, list or tuple as such a container of deferred values."""
    like = value.example()
    if type(like) is dict:
        return {key: unpacked(value[key]) for key in like}
    if type(like) in (list, tuple):
        return type(like)(unpacked(value[index]) for index in range(len(like)))
    return value


def _made_anew(value: Any) -> Any:
    """The beginning of a metric's state, made by the step itself."""
    return torch.tensor(value.tolist(), dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _zeros(tree: Any) -> Any:
    def of(leaf: Any) -> Any:
        leaf = leaf.rows if type(leaf) is MaskedRows else leaf
        return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype) if is_traced(leaf) else plain(leaf)

    return pytree.tree_map(of, tree)
