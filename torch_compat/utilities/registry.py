"""Names that users register for classes. API: ``StrategyRegistry`` and ``AcceleratorRegistry`` of Lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_compat.stock_names.table import look_up
from torch_compat.utilities.exceptions import ArgumentValueError


class Registry(dict[str, dict[str, Any]]):
    """A registry: name → ``{"description", "init_params", kind: class, f"{kind}_name": name}``.

    Args:
        kind: what is registered, ``"strategy"`` or ``"accelerator"``.
        title: the plural, as a title.
    """

    def __init__(self, kind: str, title: str) -> None:
        super().__init__()
        self._kind = kind
        self._title = title

    def _add(self, name: str, made: Callable[..., Any] | None, description: str, override: bool, params: dict[str, Any]) -> Any:
        """Register ``made`` under ``name``, or give a decorator that does.

        Raises:
            TypeError: a name that is no string.
            MisconfigurationException, ValueError: the name is taken, and ``override`` is False.
        """
        if not isinstance(name, str):
            raise TypeError(f"`name` must be a str, found {name!r}")
        if name in self and not override:
            raise ArgumentValueError(f"'{name}' is already present in the registry: `override=True` takes its place.")

        def add(cls: Callable[..., Any]) -> Callable[..., Any]:
            kind = self._kind
            self[name] = {"description": description, "init_params": params, kind: cls, f"{kind}_name": name}
            return cls

        return add if made is None else add(made)

    def get(self, name: str, default: Any | None = None) -> Any:
        """A new object of the class registered under ``name``, made with its ``init_params``; or ``default``.

        Raises:
            KeyError: there is no such name, and no default.
        """
        if name in self:
            entry = self[name]
            return entry[self._kind](**entry["init_params"])
        if default is not None:
            return default
        raise KeyError(f"'{name}' not found in registry. Available names: {', '.join(sorted(self)) or 'none'}")

    def remove(self, name: str) -> None:
        """Forget ``name``."""
        self.pop(name)

    def __str__(self) -> str:
        return f"Registered {self._title}: {', '.join(self)}"


class StrategyRegistryType(Registry):
    """Strategies by name: after ``StrategyRegistry.register("mine", Mine)`` there is ``Trainer(strategy="mine")``."""

    def __init__(self) -> None:
        super().__init__("strategy", "Strategies")

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class; without ``strategy`` a decorator. ``init_params`` are given to its constructor."""
        return self._add(name, strategy, description or "", override, init_params)

    def available_strategies(self) -> list[str]:
        """The registered names."""
        return list(self)


_OFFLOAD = {"offload_optimizer": True, "offload_parameters": True}
_NVME = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
_DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed": ("Default DeepSpeed Strategy", {}),
    "deepspeed_stage_1": ("DeepSpeed with ZeRO Stage 1 enabled", {"stage": 1}),
    "deepspeed_stage_2": ("DeepSpeed with ZeRO Stage 2 enabled", {"stage": 2}),
    "deepspeed_stage_2_offload": ("DeepSpeed ZeRO Stage 2 and CPU Offload", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": ("DeepSpeed ZeRO Stage 3", {"stage": 3}),
    "deepspeed_stage_3_offload": ("DeepSpeed ZeRO Stage 3 and CPU Offload", {"stage": 3, **_OFFLOAD}),
    "deepspeed_stage_3_offload_nvme": ("DeepSpeed ZeRO Stage 3 and NVMe Offload", {"stage": 3, **_OFFLOAD, **_NVME}),
}

_DEEPSPEED_OF_FABRIC: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed_stage_1_offload": (
        "DeepSpeed with ZeRO Stage 1 and optimizer CPU Offload",
        {"stage": 1, "offload_optimizer": True},
    )
}
_OF_FABRIC = {
    "dp": "DataParallelStrategy",
    "single_xla": "SingleDeviceXLAStrategy",
    "xla_fsdp": "XLAFSDPStrategy",
    "xla": "XLAStrategy",
}


def register_stocks_own(registry: StrategyRegistryType, package: str) -> None:
    """Register the names of strategies that stock's ``package`` alone has: they raise when they are made, and say what to use."""
    strategies = f"{package}.strategies"
    of_fabric = package == "lightning.fabric"
    for name, (description, params) in (_DEEPSPEED | (_DEEPSPEED_OF_FABRIC if of_fabric else {})).items():
        registry.register(name, look_up(strategies, "DeepSpeedStrategy"), description=description, **params)
    for name, kind in _OF_FABRIC.items() if of_fabric else ():
        registry.register(name, look_up(strategies, kind), description=kind)
    legacy = look_up(f"{package}._graveyard.tpu", "SingleTPUStrategy")
    registry.register("single_tpu", legacy, description="Legacy class. Use `single_xla` instead.")


class AcceleratorRegistryType(Registry):
    """Accelerators by name: after ``AcceleratorRegistry.register("mine", Mine)`` there is ``Trainer(accelerator="mine")``."""

    def __init__(self) -> None:
        super().__init__("accelerator", "Accelerators")

    def register(
        self,
        name: str,
        accelerator: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> Any:
        """Register a class; without ``accelerator`` a decorator. ``init_params`` are given to its constructor."""
        return self._add(name, accelerator, description, override, init_params)

    def available_accelerators(self) -> set[str]:
        """The registered names."""
        return set(self)
