"""Every public member of an accelerator of 1.3 and its plugins, overridden: the loops call them all, and no number changes."""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_compat.strategies.small import Net, loader, trainer, weights
from torch_compat.accelerators import CPUAccelerator
from torch_compat.legacy.precision_plugin import PrecisionPlugin
from torch_compat.legacy.training_type import DDPPlugin

_called = tempfile.TemporaryFile()  # noqa: SIM115
_number = _called.fileno()  # written to by number, in captured steps too: they follow a file object

ON_DEMAND = {
    # for user code to ask
    "all_gather", "get_device_stats", "on_gpu", "on_tpu", "global_rank", "local_rank", "node_rank", "world_size", "root_device",
    "distributed_sampler_kwargs", "precision", "amp_backend", "scaler", "rpc_enabled", "master_params",
    # deprecated forms of what is called
    "connect_precision_plugin", "connect_training_type_plugin",
    # where there is something to remove, to clip by value, of 2.x, or a state to restore
    "should_rank_save_checkpoint", "clip_grad_by_value", "convert_output", "tensor_init_context", "setup_device",
    "load_state_dict",
    # where the loss is scaled
    "begin_scaling", "end_scaling", "unscale_gradients",
}  # fmt: skip


def recording(base: type) -> tuple[type, set[str]]:
    """A subclass whose every public method and property notes that it was used; their names."""
    members: dict[str, Any] = {}

    def noting(name: str, static: Any) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            os.write(_number, f"{base.__name__}.{name}\n".encode())
            return getattr(super(kind, self), name)(*args, **kwargs)

        def value(self: Any) -> Any:
            os.write(_number, f"{base.__name__}.{name}\n".encode())
            return getattr(super(kind, self), name)

        if isinstance(static, property):
            return property(value)
        method.__signature__ = inspect.signature(static)  # pyright: ignore[reportFunctionMemberAccess]
        return method

    for name in dir(base):
        static = inspect.getattr_static(base, name)
        if not name.startswith("_") and (inspect.isfunction(static) or (isinstance(static, property) and static.fset is None)):
            members[name] = noting(name, static)
    kind = type(f"Noting{base.__name__}", (base,), members)
    return kind, set(members)


class Whole(Net):
    def configure_model(self) -> None:
        """Something to be called under ``model_sharded_context``."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


def test_all_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLATRAIN_EXECUTOR", "compiled")
    (hub, hub_names), (plugin, plugin_names), (precision, precision_names) = map(
        recording, (CPUAccelerator, DDPPlugin, PrecisionPlugin)
    )
    reference, net = Whole(), Whole()
    trainer(gradient_clip_val=1.0).fit(reference, loader())
    options: dict[str, Any] = {"gradient_clip_val": 1.0, "enable_checkpointing": True, "default_root_dir": tmp_path}
    one = trainer(accelerator=hub(precision(), plugin()), **options)
    one.fit(net, loader(), loader())
    torch.testing.assert_close(weights(net), weights(reference))
    one.validate(net, loader(), verbose=False)
    one.test(net, loader(), verbose=False)
    assert one.predict(net, loader())
    one.save_checkpoint(tmp_path / "saved.ckpt")
    again = trainer(accelerator=hub(precision(), plugin()), max_epochs=2, **options)
    again.fit(Whole(), loader(), ckpt_path=tmp_path / "saved.ckpt")
    _called.seek(0)
    called = set(_called.read().decode().split())
    for base, names in ((CPUAccelerator, hub_names), (DDPPlugin, plugin_names), (PrecisionPlugin, precision_names)):
        missed = {name for name in names - ON_DEMAND if f"{base.__name__}.{name}" not in called}
        # 1.x asks the training type plugin to step; the precision plugin's own is of 2.x
        assert missed == ({"optimizer_step"} if base is PrecisionPlugin else set()), base
