"""Members of stock's strategies that have no meaning on a mesh: asking for one tells what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

_GROUPS = "XLA's collectives need no process group of torch"
_REASONS = {
    "configure_ddp": "the step is compiled for the mesh, there is no DistributedDataParallel to make",
    "determine_ddp_device_ids": "the step is compiled for the mesh, there is no DistributedDataParallel to make",
    "mixed_precision_config": "torch's FSDP configuration: `precision=…` says it",
    "num_nodes": "one process drives all devices of its host: `jax.process_count()`",
    "num_processes": "one process drives all devices of its host: `strategy.world_size` counts devices",
    "process_group_backend": _GROUPS,
    "set_world_ranks": "ranks come from the processes that joined: `xlatrain.cluster.distributed`",
    "setup_distributed": f"{_GROUPS}: the world is joined before a strategy is set up",
}


class NamesWhatIsNotOffered:
    """A mixin for members that are not offered: ``hasattr`` says no, as for any missing member; the error says why."""

    if not TYPE_CHECKING:  # a checker that saw it would take every name for a member

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}: {_REASONS[name]}" if name in _REASONS else text, name=name, obj=self)
