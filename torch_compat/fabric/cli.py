"""The command ``fabric run``. API: ``lightning.fabric.cli``."""

from __future__ import annotations

from torch_compat.refused import refusing

_LAUNCH = "run `python -m torch_compat script.py`, and on several hosts `xlatrain launch` or torchrun"
_SUPPORTED_ACCELERATORS = ("cpu", "gpu", "cuda", "tpu", "auto")

__getattr__ = refusing(
    "lightning.fabric.cli",
    dict.fromkeys(("main", "_get_supported_strategies", "_set_env_variables", "_get_num_processes", "_torchrun_launch"), _LAUNCH),
)
