"""Strategies: which mesh a run uses, how parameters lie on it, and the collectives of host code.

API: ``lightning.pytorch.strategies``. A strategy is given to ``Trainer(strategy=…)`` by name or as an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torch_compat.core.optimizer import LightningOptimizer
from torch_compat.functional.model_state import ModelState
from torch_compat.plugins.precision import Precision
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import rank_zero_only
from xlatrain import checkpoint as sharded
from xlatrain import distributed
from xlatrain.data import BatchLayout
from xlatrain.mesh import data_parallel_size, make_mesh
from xlatrain.sharding import ShardingRules

_REDUCTIONS = {"mean": np.mean, "avg": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


class Strategy:
    """A device mesh and what runs on it; the base is every device in one ``data`` axis.

    Attributes:
        strategy_name: the name that ``Trainer(strategy=…)`` takes.
        mesh: made by :meth:`setup_environment`.
        rules: how parameters are split over it.
        model: the arrays of the module that is being run, between :meth:`setup` and :meth:`teardown`.
    """

    strategy_name = "ddp"

    def __init__(self, rules: ShardingRules | None = None) -> None:
        self.rules = rules or ShardingRules()
        self.precision_plugin = Precision()
        self.model: ModelState | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self._lightning_optimizers: list[LightningOptimizer] = []
        self._run_backward: Callable[..., None] | None = None
        self._mesh: Mesh | None = None
        self.pending_save: sharded.PendingSave | None = None
        self._commits_in_background = False

    # -- the world -------------------------------------------------------------------------------------------------

    def mesh_axes(self, n_devices: int, n_processes: int) -> dict[str, int]:
        """Axis name → size for this many devices."""
        return {"data": n_devices}

    def setup_environment(self, devices: Sequence[Any]) -> None:
        """Build the mesh over these JAX devices (those of all processes)."""
        processes = len({device.process_index for device in devices})
        axes = self.mesh_axes(len(devices), processes)
        everything = len(devices) == jax.device_count()
        self._mesh = make_mesh(axes, None if everything else devices)
        rank_zero_only.rank = jax.process_index()  # loggers, messages and bars are process 0's

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError(f"{type(self).__name__} has no mesh yet: it is made when a Trainer takes the strategy")
        return self._mesh

    @property
    def world_size(self) -> int:
        """Devices in the mesh."""
        return self.mesh.devices.size

    @property
    def global_rank(self) -> int:
        """Mesh index of this process's first device."""
        mine = jax.process_index()
        return next((i for i, device in enumerate(self.mesh.devices.flat) if device.process_index == mine), 0)

    @property
    def local_rank(self) -> int:
        """Always 0: one process drives all devices of its host."""
        return 0

    @property
    def node_rank(self) -> int:
        return jax.process_index()

    @property
    def is_global_zero(self) -> bool:
        return jax.process_index() == 0

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts the mesh splits a batch."""
        return data_parallel_size(self.mesh)

    @property
    def root_device(self) -> torch.device:
        """Where user code puts tensors; they go to the mesh from there."""
        return torch.device("cpu")

    @property
    def layout(self) -> BatchLayout:
        """Which process holds which rows of a batch."""
        return BatchLayout.from_mesh(self.mesh)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Documented for samplers that users make themselves: they are re-expanded to the global stream."""
        return {"num_replicas": self.data_parallel_size, "rank": self.layout.local[0]}

    # -- optimization ----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
        """What ``manual_backward`` calls: hooks around ``LightningModule.backward``."""
        if self._run_backward is None:
            raise RuntimeError("backward runs inside training_step of a run with manual optimization")
        self._run_backward(loss, *args, **kwargs)

    # -- collectives over processes --------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process is here."""
        if jax.process_count() > 1:
            distributed.barrier(name or "barrier")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of process ``src``, on every process; objects are pickled."""
        return obj if jax.process_count() == 1 else distributed.broadcast_object(obj, src)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``tensor`` of every process, stacked: ``(processes, …)``. Inside a captured step the world is one: ``tensor[None]``.

        Raises:
            MisconfigurationException: a process group.
        """
        if group is not None:
            raise MisconfigurationException(
                "all_gather(group=…) is not supported: collectives run over all processes of the mesh"
            )
        if jax.process_count() == 1:
            return tensor[None]
        return torch.stack(distributed.all_gather_object(tensor.detach().cpu()))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str | None = "mean") -> Any:
        """``tensor`` reduced over processes; anything but a tensor is returned as it is."""
        if not isinstance(tensor, torch.Tensor) or jax.process_count() == 1:
            return tensor
        gathered = self.all_gather(tensor, group)
        op = str(reduce_op or "mean").lower()
        if op not in _REDUCTIONS:
            raise ValueError(f"reduce_op={reduce_op!r}; expected one of {', '.join(_REDUCTIONS)}")
        if op in ("mean", "avg"):
            return gathered.float().mean(0) if not gathered.is_floating_point() else gathered.mean(0)
        return gathered.sum(0) if op == "sum" else (gathered.amin(0) if op == "min" else gathered.amax(0))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """True if every process (``all``), or any process, says True."""
        if jax.process_count() == 1:
            return decision
        decisions = distributed.all_gather_object(bool(decision))
        return min(decisions) if all else max(decisions)

    def reduce_value(self, value: float, reduction: str) -> float:
        """One host number reduced over processes."""
        if jax.process_count() == 1:
            return value
        return float(_REDUCTIONS[reduction](distributed.all_gather_object(value)))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: Mapping[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint dict; every process calls it; returns when committed (but see :meth:`commits_in_background`)."""
        from torch_compat.checkpointing import save_checkpoint_dict

        if storage_options is not None:
            raise TypeError(
                "save_checkpoint(storage_options=…) is not supported by sharded checkpoints; use a path or URL that fsspec opens"
            )
        wait = not self._commits_in_background
        self.pending_save = save_checkpoint_dict(filepath, checkpoint, on_mesh=self._array_of, wait=wait)

    @contextmanager
    def commits_in_background(self) -> Iterator[None]:
        """Inside, :meth:`save_checkpoint` returns when the arrays are off the devices; ``pending_save`` tells of the commit.

        ``pending_save`` stays None where a subclass saves in its own way.
        """
        self.pending_save = None
        self._commits_in_background = True
        try:
            yield
        finally:
            self._commits_in_background = False

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint dict (a directory of ours, or a stock ``.ckpt`` file), on every process."""
        from torch_compat.checkpointing import load_checkpoint_dict

        return load_checkpoint_dict(checkpoint_path, weights_only, lazy=True)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint (process 0)."""
        if not self.is_global_zero:
            return
        path = Path(filepath)
        if path.is_file() or path.is_symlink():
            path.unlink()
        elif sharded.is_checkpoint(path):
            sharded.remove(path)
        elif path.exists():
            raise MisconfigurationException(f"{path} is no checkpoint; it was not deleted")

    def _array_of(self, tensor: torch.Tensor) -> jax.Array | None:
        """The array behind a live parameter or buffer."""
        if self.model is None:
            return None
        name = self.model.name_of(tensor)
        return None if name is None else self.model.array(name)

    def teardown(self) -> None:
        """Forget the module's arrays."""
        self.model = None
        self.optimizers = []
        self._lightning_optimizers = []
