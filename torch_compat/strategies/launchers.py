"""Launchers, which start processes. API: ``lightning.pytorch.strategies.launchers``.

The Trainer starts none but for ``strategy="ddp_spawn"``: whoever runs the script does (``xlatrain launch``, torchrun, SLURM), or
nobody, as one process drives all devices of its host.
"""

from __future__ import annotations

from torch_compat.utilities.refused import refusing

__path__: list[str] = []  # lightning.pytorch.strategies.launchers.multiprocessing and its like are this module

_SPAWN = "Trainer(strategy='ddp_spawn') starts processes itself; `xlatrain launch --processes N` starts a script N times"
_LAUNCH = "one process drives all devices of its host; `xlatrain launch --processes N script.py` or torchrun start more"

__getattr__ = refusing(
    "lightning.pytorch.strategies.launchers",
    {
        "_Launcher": _LAUNCH,
        "_MultiProcessingLauncher": _SPAWN,
        "_SubprocessScriptLauncher": _LAUNCH,
        "_XLALauncher": _LAUNCH,
        "_WorkerOutput": _SPAWN,
        "_GlobalStateSnapshot": _SPAWN,
        "_ChildProcessObserver": _LAUNCH,
        "_check_bad_cuda_fork": _SPAWN,
        "_check_missing_main_guard": _SPAWN,
        "_disable_module_memory_sharing": _SPAWN,
        "_basic_subprocess_cmd": _LAUNCH,
        "_hydra_subprocess_cmd": _LAUNCH,
        "_launch_process_observer": _LAUNCH,
        "_rank_teardown": _LAUNCH,
    },
)
