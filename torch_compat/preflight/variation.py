"""Variations of a run: changes that preflight makes to a Trainer to see what would fit, or be faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jax.sharding import PartitionSpec
from torch.nn import ModuleList, Sequential

from torch_compat.plugins.precision_names import make_precision
from torch_compat.strategies import DDPStrategy, MeshStrategy, SingleDeviceStrategy
from torch_compat.strategies.layout import layout_of, strategy_of

if TYPE_CHECKING:
    import torch

    from torch_compat.trainer.trainer import Trainer


class NamedRules(NamedTuple):
    """Sharding rules by a name.

    Attributes:
        name: in reports.
        rules: pairs of a glob over parameter paths and a ``PartitionSpec``, as of ``MeshStrategy``; none: the automatic rule.
    """

    name: str
    rules: tuple[tuple[str, PartitionSpec], ...] = ()


@dataclass(frozen=True)
class Variation:
    """Changes of a run; the default changes nothing.

    Attributes:
        axes: ``(axis, size)`` pairs of another mesh.
        divide: batches are so much smaller, and so many more of them are accumulated: an optimizer step sees the same rows.
        remat: layers compute their activations again: as the models of transformers do it themselves
            (``gradient_checkpointing_enable``), else by ``MeshStrategy(remat=…)`` for every list of equal layers.
        precision: another precision.
        rules: a name, and the sharding rules that take the place of the strategy's own.
    """

    axes: tuple[tuple[str, int], ...] | None = None
    divide: int = 1
    remat: bool = False
    precision: str | None = None
    rules: NamedRules | None = None

    def __str__(self) -> str:
        parts = []
        if self.axes is not None:
            parts.append(f"MeshStrategy({dict(self.axes)})")
        if self.divide > 1:
            parts.append(f"batch_size / {self.divide} with accumulate_grad_batches × {self.divide}")
        if self.remat:
            parts.append("gradient checkpointing")
        if self.precision is not None:
            parts.append(f"precision={self.precision!r}")
        if self.rules is not None:
            parts.append(f"rules {self.rules.name!r}")
        return ", ".join(parts) or "as it is"

    @contextlib.contextmanager
    def of(self, trainer: Trainer, module: torch.nn.Module, devices: Any) -> Iterator[None]:
        """The Trainer with these changes and devices; afterwards as it was."""
        strategy, accumulate = trainer.strategy, trainer.accumulate_grad_batches
        own, mesh, plugin = strategy._mesh_run.devices, strategy._mesh_run.mesh, strategy._precision_plugin
        chosen: Any = strategy
        lists = repeated_layers(module) if self.remat and not checkpointable(module) else []
        if self.axes is not None:
            chosen = strategy_of(self._layout(strategy, lists))
        elif type(strategy) is SingleDeviceStrategy and len(devices) > 1:
            chosen = DDPStrategy()  # as strategy="auto" chooses on several devices
        if chosen is not strategy:
            chosen.accelerator = strategy.accelerator
        chosen._precision_plugin = plugin if self.precision is None else make_precision(self.precision, devices[0].platform)
        chosen.take_devices(devices)
        trainer.strategy = chosen
        trainer.accumulate_grad_batches = accumulate * self.divide
        try:
            yield
        finally:
            trainer.strategy, trainer.accumulate_grad_batches = strategy, accumulate
            strategy._precision_plugin = plugin
            strategy._mesh_run.devices, strategy._mesh_run.mesh = own, mesh

    @contextlib.contextmanager
    def of_module(self, module: torch.nn.Module) -> Iterator[None]:
        """The module with these changes, once ``configure_model`` has made it; afterwards as it was."""
        switched = [one for one in checkpointable(module) if not one.is_gradient_checkpointing] if self.remat else []
        for one in switched:
            _switch(one, "enable")
        try:
            yield
        finally:
            for one in switched:
                _switch(one, "disable")

    def _layout(self, strategy: Any, lists: list[str]) -> dict[str, Any]:
        layout = layout_of(strategy, dict(self.axes or ()))
        if self.rules is not None:
            layout |= {
                "rules": layout_of(MeshStrategy(rules=self.rules.rules), {})["rules"],
                "logical_axes": [],
                "axis_rules": {},
            }
        if lists:
            layout["remat"] = lists
        if dict(self.axes or ()).get("tensor", 1) > 1 and layout["tensor_parallel_plan"] is None and self.rules is None:
            layout["tensor_parallel_plan"] = "auto"
        return layout


def checkpointable(module: torch.nn.Module) -> list[Any]:
    """The outermost submodules that can switch to recomputing their activations."""
    found: list[Any] = []
    for name, one in module.named_modules():
        able = getattr(one, "supports_gradient_checkpointing", False) and hasattr(one, "gradient_checkpointing_enable")
        if able and not any(name.startswith(f"{other}.") or other == "" for other, _ in found):
            found.append((name, one))
    return [one for _, one in found]


def repeated_layers(module: torch.nn.Module) -> list[str]:
    """Globs over the layers of each list of at least two of one class that have parameters; of nested lists the outermost."""
    found: list[str] = []
    for name, one in module.named_modules():
        layers = list(one.children())
        listed = name and len(layers) > 1 and isinstance(one, ModuleList | Sequential) and len({*map(type, layers)}) == 1
        inside = any(name.startswith(outer.removesuffix("*")) for outer in found)
        if listed and not inside and any(True for _ in one.parameters()):
            found.append(f"{name}.*")
    return found


def _switch(module: Any, which: str) -> None:
    """transformers renamed the method in version 5."""
    new = getattr(module, f"activation_checkpointing_{which}", None)
    (new or getattr(module, f"gradient_checkpointing_{which}"))()


def settings_of(trainer: Trainer, variation: Variation, mesh: Mapping[str, int], rows: int | None) -> dict[str, Any]:
    """The settings that decide about the programs, for the report and the plan."""
    return {
        "strategy": type(trainer.strategy).__name__,
        "layout": layout_of(trainer.strategy, mesh),
        "precision": variation.precision or trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches * variation.divide,
        "global_batch_rows": rows,
        "gradient_checkpointing": variation.remat,
    }
