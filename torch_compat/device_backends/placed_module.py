"""A torch module whose parameters, buffers and metrics are on the devices of a backend."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from torch_compat.checkpoint.checkpoint_dict import restore_arrays
from torch_compat.core.device_dtype import _update_properties
from torch_compat.device_backends.backend import DeviceBackend
from torch_compat.step.materialize import check_dense, detach_sources, place_tensors
from torch_compat.step.metrics.calls import metric_modules
from torch_compat.utilities.metric_types import is_metric
from torch_compat.utilities.rank_zero import rank_zero_warn
from xlatrain.bridge.tensors.dtypes import jax_dtype
from xlatrain.cluster import distributed
from xlatrain.host.host_memory import available_host_memory
from xlatrain.mesh.mesh import is_multiprocess
from xlatrain.mesh.sharding import ShardingRules, replicated
from xlatrain.step.optimizers.by_parameter import leaf_sharding


class PlacedModule:
    """Moves a module to the devices, and back.

    The ``nn.Parameter`` objects stay what they are, so that optimizers made before find them. A parameter that was made in
    ``configure_model``, or under ``model_sharded_context``, gets its values on the host devices of its shards, and is moved from
    there before the next one is made.

    Args:
        module: parameters and buffers are read, or made, once, and placed.
        backend: whose devices.
        mesh: of the host devices that stand for them.
        rules: how parameters are split.
    """

    def __init__(self, module: torch.nn.Module, backend: DeviceBackend, mesh: Mesh, rules: ShardingRules) -> None:
        self._module, self._backend, self._mesh = module, backend, mesh
        self.params = dict(module.named_parameters())
        metrics = metric_modules(module)  # move by themselves
        skipped = {id(b) for child in module.modules() if id(child) in metrics for b in child.buffers(recurse=False)}
        buffers = {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in skipped}
        self._tensors = {**self.params, **buffers}
        check_dense(self._tensors)
        self._shardings: dict[str, NamedSharding] = rules.shardings(self.params, mesh)
        self._shardings |= dict.fromkeys(buffers, replicated(mesh))
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._place()
        self._metrics = [child for child in module.modules() if is_metric(child)]
        self._move_metrics(backend.root_device)
        _update_properties(module, device=backend.root_device)

    def _place(self) -> None:
        def take(name: str, array: jax.Array) -> torch.Tensor:
            return self._backend.put_array(array, self._tensors[name].dtype)

        waiting = {name: tensor for name, tensor in self._tensors.items() if not self._backend.owns(tensor)}
        placed = place_tensors(waiting, self._shardings, multiprocess=is_multiprocess(self._mesh), take=take)
        detach_sources(waiting)
        for name, tensor in waiting.items():
            if not _exchange(tensor, placed[name]):
                raise RuntimeError(
                    f"{name!r} cannot be moved to {self._backend.root_device}: a graph or a weak reference of before the run "
                    "refers to it; make no loss with the module before fit, or detach it"
                )

    def _move_metrics(self, device: torch.device) -> None:
        for metric in self._metrics:
            metric.to(device)

    def sharding_of(self, tensor: torch.Tensor) -> NamedSharding:
        """The sharding of a tensor on the host mesh: a parameter or buffer as it was placed, anything else whole everywhere."""
        name = self._names.get(id(tensor))
        return replicated(self._mesh) if name is None else self._shardings[name]

    def spec_like(self, param: torch.Tensor, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of state of this shape that belongs to a parameter."""
        sharding = leaf_sharding(self.sharding_of(param), tuple(param.shape), shape)
        assert isinstance(sharding, NamedSharding)
        return sharding

    def state_shardings(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, NamedSharding]:
        """The identity of each tensor of the optimizers' state, and how it lies on the host mesh."""
        return {
            id(leaf): self.spec_like(param, tuple(leaf.shape))
            for optimizer in optimizers
            for param, leaves in optimizer.state.items()
            for leaf in leaves.values()
            if isinstance(leaf, torch.Tensor)
        }

    def place_like(self, param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """State of a parameter, from the host or directly from a checkpoint, on the parameter's shards.

        Scalars (Adam's step) stay on the host, where torch keeps them.
        """
        if not values.ndim:
            return values.detach().clone()
        shape = tuple(values.shape)
        template = jax.ShapeDtypeStruct(shape, jax_dtype(values.dtype), sharding=self.spec_like(param, shape))
        array = restore_arrays({"state": values}, {("state",): template})[("state",)]
        return self._backend.put_array(array, values.dtype)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a state as ``optimizer.load_state_dict`` does, tensor by tensor, each on the shards of its parameter."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        saved = [index for group in state["param_groups"] for index in group["params"]]
        owners = dict(zip(saved, params, strict=False))

        def placed(index: Any, values: Any) -> Any:
            return self.place_like(owners[index], values) if isinstance(values, torch.Tensor) and index in owners else values

        states = {
            index: {key: placed(index, values) for key, values in leaves.items()} for index, leaves in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": states})

    def annotate(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer's state split like its parameters, once it has been made."""
        for param, leaves in optimizer.state.items():
            for leaf in leaves.values():
                if isinstance(leaf, torch.Tensor) and self._backend.owns(leaf):
                    self._backend.annotate(leaf, self.spec_like(param, tuple(leaf.shape)).spec)

    def release(self, optimizers: list[torch.optim.Optimizer], *, failed: bool = False) -> None:
        """Give module, metrics and optimizers ordinary host tensors again; where the host is too small they stay on the devices.

        Then another run goes on with them there. On several processes all must come, unless the run ``failed``, maybe on some.
        """
        if not self._fits_host(optimizers, failed=failed):
            rank_zero_warn(f"the module does not fit this host's memory: it stays on {self._backend.root_device}, sharded")
            return
        gc.collect()  # graphs in reference cycles would hold on to parameters
        stuck = []
        for name, tensor in self._tensors.items():
            if not self._backend.owns(tensor):
                continue
            grad = tensor.grad
            tensor.grad = None
            if not _exchange(tensor, tensor.detach().cpu()):
                stuck.append(name)
            elif grad is not None:
                tensor.grad = grad.cpu()
        self._move_metrics(torch.device("cpu"))
        for optimizer in optimizers:
            for leaves in optimizer.state.values():
                leaves.update({key: leaf.cpu() for key, leaf in leaves.items() if isinstance(leaf, torch.Tensor)})
        if stuck:
            rank_zero_warn(
                f"{stuck[0]!r} and {len(stuck) - 1} more tensors stay on {self._backend.root_device}: something holds a loss "
                "with its graph beyond the run; keep loss.detach()"
            )
        else:
            _update_properties(self._module, device=torch.device("cpu"))

    def _fits_host(self, optimizers: list[torch.optim.Optimizer], *, failed: bool) -> bool:
        """Whether each process can have the whole module and its optimizer's state."""
        several = is_multiprocess(self._mesh)
        if several and failed:
            return False
        state = [leaf for optimizer in optimizers for leaves in optimizer.state.values() for leaf in leaves.values()]
        tensors = [leaf for leaf in [*self._tensors.values(), *state] if isinstance(leaf, torch.Tensor)]
        fits = sum(leaf.nbytes for leaf in tensors if self._backend.owns(leaf)) <= available_host_memory()
        return min(distributed.all_gather_object(fits)) if several else fits


def _exchange(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Have ``tensor``, the same Python object, be what ``values`` is; False where something else refers to its storage."""
    attributes, hooks = dict(vars(tensor)), tensor._backward_hooks
    new = torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values
    if not isinstance(tensor, torch.nn.Parameter):
        new.requires_grad_(tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, new)
    except RuntimeError:
        return False
    vars(tensor).update(attributes)
    tensor._backward_hooks = hooks
    return True
