"""Old import names of what moved: for one release they give the same objects, with a warning that names the new one.

:data:`MODULES` holds the engine's modules that moved, :data:`NAMES` its functions and classes that are called otherwise, or whose
module became a package. A package on top registers its own with :func:`register`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def below(old: str, new: str, names: str) -> dict[str, str]:
    """``{"old.name": "new.name"}`` for each of the ``names``, which spaces part."""
    return {f"{old}.{name}": f"{new}.{name}" for name in names.split()}


_X, _B = "xlatrain", "xlatrain.bridge"

MODULES: dict[str, str] = {
    **below(_X, "xlatrain.mesh", "placement data lockstep snapshot sharding"),
    "xlatrain.rows": "xlatrain.mesh.batch_layout",
    "xlatrain.sharding.placed": "xlatrain.mesh.sharding.rules",
    "xlatrain.sharding.saving": "xlatrain.mesh.sharding.picture",
    "xlatrain.sharding.table": "xlatrain.mesh.sharding.sharding_table",
    **below(_X, "xlatrain.step", "state engine stacking clipping loss_scale finite offload device_memory optimizers"),
    "xlatrain.optimizers.shardings": "xlatrain.step.optimizers.by_parameter",
    **below(_X, "xlatrain.xla", "jaxprs compilation_cache peak_flops profiling"),
    "xlatrain.cpu_compiler": "xlatrain.xla.compiler_options",
    "xlatrain.precision": "xlatrain.xla.compiler_options",
    "xlatrain.first_run": "xlatrain.xla.compilation_cache",
    **below(_X, "xlatrain.xla.passes", "batch_groups gathering ordering reduce_scatters"),
    "xlatrain.rewriting": "xlatrain.xla.passes.apply",
    "xlatrain.splits": "xlatrain.xla.passes.gathering",
    **below(_X, "xlatrain.host", "host_memory malloc libtpu_environment"),
    **below(_X, "xlatrain.cluster", "distributed watch launch hosts spawn"),
    "xlatrain.relay": "xlatrain.cluster.remote_child",
    "xlatrain.manifests": "xlatrain.cluster.cluster_templates",
    "xlatrain.checkpoint.interrupts": "xlatrain.checkpoint.agreement",
    "xlatrain.checkpoint.names": "xlatrain.checkpoint.arrays",
    **below(_B, "xlatrain.bridge.capture", "compiling decompositions traceable functionalization graph_nodes op_log op_facts"),
    **below(_B, "xlatrain.bridge.capture", "attention activations offloading rematerialization updates tracebacks tree_maps"),
    **below(_B, "xlatrain.bridge.capture.recorded", "tape replay expansions fake_results"),
    "xlatrain.bridge.decompositions.table": "xlatrain.bridge.capture.decompositions.decomposition_table",
    "xlatrain.bridge.traceable.host_checks": "xlatrain.bridge.capture.traceable.value_checks",
    "xlatrain.bridge.traceable.operand_dtypes": "xlatrain.bridge.capture.traceable.value_checks",
    "xlatrain.bridge.traceable.tensor_data": "xlatrain.bridge.capture.functionalization",
    "xlatrain.bridge.op_mode": "xlatrain.bridge.capture.op_facts",
    "xlatrain.bridge.flat_call": "xlatrain.bridge.capture.recorded.fake_results",
    **below(_B, "xlatrain.bridge.lower", "interpret registry lowerings channels_last recomputation operands"),
    "xlatrain.bridge.partitioning": "xlatrain.bridge.lower.registry",
    "xlatrain.bridge.keys": "xlatrain.bridge.lower.prng",
    "xlatrain.bridge.cudnn": "xlatrain.bridge.lower.kernels.cudnn",
    **{
        f"xlatrain.bridge.lowerings.{name}": "xlatrain.bridge.lower.lowerings.own_ops"
        for name in ("activations", "offloading", "rematerialization", "updates")
    },
    "xlatrain.bridge.lowerings.grouped_matmul": "xlatrain.bridge.lower.lowerings.matmul",
    **below(_B, "xlatrain.bridge.loops", "schedule rolling repetition loop_builder"),
    **below(_B, "xlatrain.bridge.tensors", "constants dtypes host host_copies live"),
    "xlatrain.bridge.hollow": "xlatrain.bridge.tensors.host_copies",
    "xlatrain.bridge.deferred": "xlatrain.bridge.lazy_init",
    "xlatrain.bridge.installed": "xlatrain.bridge.errors",
}
"""Old module → new module. With a package all that is below it has moved, but for modules with a line of their own."""

_STEP, _CAPTURE = "xlatrain.step.step", "xlatrain.bridge.capture.capture"

NAMES: dict[str, dict[str, str]] = {
    "xlatrain.step": {
        name: f"{_STEP}.{name}"
        for name in (
            *("GradientFunction", "GradientOutput", "StepBuilder", "UpdateFunction", "UpdatedOutput", "UpdatingFunction"),
            *("add_gradients", "constrain", "no_update", "pack_scalars", "shardings_of", "state_shardings"),
        )
    },
    "xlatrain.bridge.capture": {
        name: f"{_CAPTURE}.{name}" for name in ("Capture", "Output", "TensorSpec", "capture_recorded", "rehearse")
    },
    "xlatrain.bridge.loops": {"Values": "xlatrain.bridge.loops.scan.Values"},
    "xlatrain.rows": {"Rows": "xlatrain.mesh.batch_layout.BatchPadding"},
    "xlatrain.data": {"Rows": "xlatrain.mesh.batch_layout.BatchPadding"},
    "xlatrain.placement": {"Transfer": "xlatrain.mesh.placement.TransferPlan"},
    "xlatrain.rewriting": {"rewritten": "xlatrain.xla.passes.apply.apply_jaxpr_passes"},
    "xlatrain.ordering": {"ordered": "xlatrain.xla.passes.ordering.serialize_collectives"},
    "xlatrain.batch_groups": {"left_to_the_partitioner": "xlatrain.xla.passes.batch_groups.auto_axes"},
    "xlatrain.splits": {"Split": "xlatrain.xla.passes.gathering.DimAxes"},
    "xlatrain.distributed.cluster": {"Place": "xlatrain.cluster.distributed.cluster.ProcessPlace"},
    "xlatrain.bridge.hollow": {
        "hollow": "xlatrain.bridge.tensors.host_copies.storageless",
        "hollow_like": "xlatrain.bridge.tensors.host_copies.storageless_like",
    },
}
"""Old module → old name in it → new name, with its module."""


def old_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module`` that finds old ``names``, and warns once of each."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module))
        home, _, attribute = names[name].rpartition(".")
        _warn(f"{module}.{name}", names[name], stacklevel=3)
        value = getattr(importlib.import_module(home), attribute)
        setattr(sys.modules[module], name, value)
        return value

    return find


def called_as(module: str, function: str) -> None:
    """Let ``module``, which has taken the place of its ``function`` in their package, be called like it."""

    class CallableModule(ModuleType):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            _warn(module, f"{module}.{function}", stacklevel=3)
            return vars(self)[function](*args, **kwargs)

    sys.modules[module].__class__ = CallableModule


def register(modules: Mapping[str, str], names: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Let old ``modules``, like :data:`MODULES`, and old ``names`` in them, like :data:`NAMES`, be imported."""
    sys.meta_path.insert(0, _Finder(modules, names or {}))  # in front: a submodule's parent may be a package that has such a one


class _Finder(MetaPathFinder):
    """Finds the new module for an old name."""

    def __init__(self, modules: Mapping[str, str], names: Mapping[str, Mapping[str, str]]) -> None:
        self._modules, self._names = modules, names
        self._roots = tuple({f"{name.partition('.')[0]}." for name in modules})

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith(self._roots):
            return None
        new = self._moved(fullname)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return ModuleSpec(fullname, _Loader(new, self._names.get(fullname, {})), is_package=True)

    def _moved(self, name: str) -> str | None:
        head, tail = name, ""
        while head:
            if head in self._modules:
                return self._modules[head] + tail
            head, dot, last = head.rpartition(".")
            tail = dot + last + tail
        return None


class _Loader(Loader):
    """Puts the new module into ``sys.modules`` under the old name."""

    def __init__(self, new: str, names: Mapping[str, str]) -> None:
        self._new, self._names = new, names

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _warn(module.__name__, self._new, stacklevel=3)
        # The import system returns what is in `sys.modules` afterwards; the new module's own `__spec__` stays untouched.
        found = sys.modules[module.__name__] = importlib.import_module(self._new)
        if self._names:
            vars(found).setdefault("__getattr__", old_names(self._new, self._names))


def _warn(old: str, new: str, stacklevel: int) -> None:
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=stacklevel)
