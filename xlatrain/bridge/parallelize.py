"""Records of the parallelization that user code asks torch for; torch itself does nothing.

``parallelize_module(module, mesh, plan)`` and ``fully_shard(module, mesh=…)`` of torch make DTensors of parameters and put
collectives around modules. On a JAX mesh both are only statements about where parameters lie. API:
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.

Torch's functions are imported where they are needed: with their modules that takes a second.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CellType, FrameType
from typing import Any

import torch

from xlatrain.bridge.patches import patched
from xlatrain.bridge.tensor_parallel import split_of
from xlatrain.mesh.sharding import PlannedSplit

DATA, TENSOR = "data_parallel", "tensor_parallel"


class MeshView:
    """A stand-in for torch's ``DeviceMesh`` in user code: names and sizes. There are no process groups behind it.

    Args:
        sizes: dim name → size, in order.
    """

    device_type = "cpu"

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = dict(sizes)

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Names of the dims."""
        return tuple(self._sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims."""
        return tuple(self._sizes.values())

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._sizes)

    def size(self, mesh_dim: int | None = None) -> int:
        """Size of one dim, or of all together."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]

    def __getitem__(self, names: str | tuple[str, ...]) -> MeshView:
        """The dims of these names.

        Raises:
            KeyError: a name that the mesh lacks.
        """
        wanted = (names,) if isinstance(names, str) else tuple(names)
        if unknown := [name for name in wanted if name not in self._sizes]:
            raise KeyError(f"device_mesh[{names!r}]: no dim {unknown}; its dims are {self._sizes}")
        return MeshView({name: self._sizes[name] for name in wanted})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"device_mesh.{name}: a mesh of XLA devices has no torch process groups. It has size(), shape, ndim, "
            "mesh_dim_names and device_mesh['data_parallel'], and goes to parallelize_module and fully_shard"
        )

    def __repr__(self) -> str:
        return f"MeshView({', '.join(f'{name}={size}' for name, size in self._sizes.items())})"


class Parallelized:
    """The parallelization that user code asked for.

    Attributes:
        styles: modules and the style that was applied to each, in order.
        sharded: modules given to ``fully_shard``.
        view: the mesh that user code sees.
    """

    def __init__(self, view: MeshView) -> None:
        self.view = view
        self.styles: list[tuple[torch.nn.Module, str]] = []
        self.sharded: list[torch.nn.Module] = []
        self._divided: dict[tuple[int, str], tuple[torch.nn.Module, str, int]] = {}

    def __bool__(self) -> bool:
        return bool(self.styles or self.sharded)

    def splits(self, root: torch.nn.Module) -> dict[str, PlannedSplit]:
        """The planned split of every parameter of ``root``: which dim is split."""
        style_of = {id(module): style for module, style in self.styles}
        covered = {id(child) for module in self.sharded for child in module.modules()}
        found: dict[str, PlannedSplit] = {}
        for path, owner in root.named_modules(remove_duplicate=False):
            style = style_of.get(id(owner))
            for name, param in owner.named_parameters(recurse=False):
                dim = None if style is None else split_of(owner, param, style)
                told = [text for text in (style, "fully_shard" if id(owner) in covered else None) if text]
                full = f"{path}.{name}" if path else name
                found[full] = PlannedSplit(dim, "configured " + (", ".join(told) or "whole"), fsdp=id(owner) in covered)
        return found

    def restore_divided(self) -> list[str]:
        """Give modules back the numbers that were divided by the tensor-parallel size (heads of a process); says which.

        Modules see whole tensors here, whatever their placement.
        """
        parallel = [module for module, _ in self.styles]
        told = []
        for module, name, before in self._divided.values():
            if any(child is one for one in parallel for child in module.modules()):
                told.append(f"{type(module).__name__}.{name} is {before}, not {getattr(module, name)}")
                setattr(module, name, before)
        self._divided.clear()
        return sorted(set(told))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, torch's functions record the parallelization asked for, where they are given :attr:`view`."""
        with self._styles_taken_down(), self._sharding_taken_down(), self._divisions_noted():
            yield

    # -- tensor parallelism ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _styles_taken_down(self) -> Iterator[None]:
        from torch.distributed.tensor.parallel import style as styles

        kinds: list[Any] = [styles.ColwiseParallel, styles.RowwiseParallel, styles.SequenceParallel]
        about_activations = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
        kinds += [getattr(styles, name) for name in about_activations if hasattr(styles, name)]

        def taking_down(original: Any, style: str) -> Any:
            def apply(style_object: Any, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
                if not isinstance(device_mesh, MeshView):
                    return original(style_object, module, device_mesh)
                self._take_style(module, device_mesh, style)
                return module

            return apply

        with patched([(kind, "_apply", taking_down(kind._apply, kind.__name__)) for kind in kinds]):
            yield

    def _take_style(self, module: torch.nn.Module, mesh: MeshView, style: str) -> None:
        if mesh.mesh_dim_names != (TENSOR,):
            raise ValueError(
                f"parallelize_module({type(module).__name__}, {mesh}, …): expected the mesh device_mesh[{TENSOR!r}], of one dim"
            )
        weighed = style in ("ColwiseParallel", "RowwiseParallel")
        if weighed and not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            raise NotImplementedError(f"{style} splits nn.Linear and nn.Embedding, but was given {type(module).__name__}")
        if not style.startswith("Prepare"):  # XLA decides where inputs and outputs lie
            self.styles.append((module, style))

    @contextlib.contextmanager
    def _divisions_noted(self) -> Iterator[None]:
        """Note integers of modules that are divided by the tensor-parallel size, outside of constructors."""
        size = self.view[TENSOR].size()
        original = torch.nn.Module.__setattr__

        def set_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
            before = module.__dict__.get(name)
            if type(value) is int and type(before) is int and value and before == value * size and not _constructing(module):
                self._divided[id(module), name] = (module, name, before)
            original(module, name, value)  # pyright: ignore[reportArgumentType]

        with patched([(torch.nn.Module, "__setattr__", set_attribute)] if size > 1 else []):
            yield

    # -- fully sharded data parallelism ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sharding_taken_down(self) -> Iterator[None]:
        from torch.distributed.fsdp import fully_shard

        cell = _function_cell(fully_shard)
        original = cell.cell_contents

        def take_down(module: Any, *, mesh: Any = None, **options: Any) -> Any:
            if mesh is not None and not isinstance(mesh, MeshView):
                return original(module, mesh=mesh, **options)
            modules = [module] if isinstance(module, torch.nn.Module) else list(module)
            _check_sharding(modules, mesh, options)
            self.sharded += modules
            return module

        cell.cell_contents = take_down
        try:
            yield
        finally:
            cell.cell_contents = original
            for module in self.sharded:
                _forget_contract(module)


def _check_sharding(modules: Sequence[torch.nn.Module], mesh: MeshView | None, options: Mapping[str, Any]) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    where = f"fully_shard({', '.join(type(module).__name__ for module in modules)})"
    if mesh is not None and mesh.mesh_dim_names != (DATA,):
        raise ValueError(f"{where}: mesh={mesh}; expected device_mesh[{DATA!r}], of one dim")
    if options.get("mp_policy", MixedPrecisionPolicy()) != MixedPrecisionPolicy():
        raise ValueError(f"{where}: mp_policy is not supported on an XLA mesh: set precision='bf16-mixed' or 'bf16-true'")
    if type(options.get("offload_policy", OffloadPolicy())) is not OffloadPolicy:
        raise ValueError(f"{where}: offload_policy is not supported on an XLA mesh: shard over more devices instead")
    if options.get("ignored_params"):
        raise ValueError(f"{where}: ignored_params is not supported: call fully_shard on the modules whose parameters are split")


def _function_cell(decorated: Any) -> CellType:
    """The closure cell of torch's decorated function that holds its original: user code may have imported it by name."""
    names = decorated.__code__.co_freevars
    if "func" not in names:
        raise RuntimeError(f"torch {torch.__version__}: fully_shard is made in another way than in torch 2.11 to 2.13")
    return decorated.__closure__[names.index("func")]


def _forget_contract(module: torch.nn.Module) -> None:
    """Remove what torch's decorator left on a module that it knows to be sharded."""
    contract = sys.modules["torch.distributed._composable.contract"]
    for key in (contract.STATE_KEY, contract.REGISTRY_KEY):
        module.__dict__.pop(key, None)


def _constructing(module: torch.nn.Module) -> bool:
    """Whether a constructor of ``module`` is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
