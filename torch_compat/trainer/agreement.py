"""The comparison that a run's processes make of what they are about to do, before its first collective.

One host with an older checkout, another flag or a layer more would otherwise be a hang, or weights that drift apart.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torch_compat
import xlatrain
from torch_compat.run import report
from xlatrain.cluster.distributed import agree, world

if TYPE_CHECKING:
    from torch_compat.trainer.trainer import Trainer

_TRAINER = (
    "max_epochs", "min_epochs", "max_steps", "min_steps", "fast_dev_run", "overfit_batches", "limit_train_batches",
    "limit_val_batches", "limit_test_batches", "limit_predict_batches", "val_check_interval", "val_check_seconds",
    "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps", "accumulate_grad_batches", "gradient_clip_val",
    "gradient_clip_algorithm", "use_distributed_sampler", "reload_dataloaders_every_n_epochs", "precision",
)  # fmt: skip
_VARIABLES = ("XLATRAIN_EXECUTOR", "XLATRAIN_ROLL_LAYERS", "XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION")
_ADVICE = "start every process with the same command, code, environment and packages"


def check_same_run(trainer: Trainer) -> None:
    """Compare configuration, code, packages and parameters between all processes; collective.

    Raises:
        DisagreementError: on every process; names the odd ones and what is different.
    """
    if world().process_count > 1:
        agree("the run", dict(_facts(trainer)), _ADVICE)


def check_same_checkpoint(path: str, committed: Any) -> None:
    """Compare which checkpoint every process is about to read; collective.

    Args:
        path: as this process has it.
        committed: what this process sees of it; a stale view of a shared filesystem differs.

    Raises:
        DisagreementError: on every process; names the odd ones.
    """
    facts = {"the path": path, "what is committed there": str(committed)}
    agree("the checkpoint to restore", facts, "give every process the same path, on a filesystem that all of them share")


def _facts(trainer: Trainer) -> Iterator[tuple[str, str]]:
    yield "the call", f"Trainer.{getattr(trainer.state.fn, 'value', None)}()"
    for name in _TRAINER:
        yield f"Trainer.{name}", str(getattr(trainer, name, None))
    yield "the strategy", type(trainer.strategy).__name__
    yield "Python", platform.python_version()
    for name, version in report.versions().items():
        yield f"the version of {name}", version
    for name in _VARIABLES:
        yield f"the variable {name}", os.environ.get(name, "unset")
    yield from _code(trainer)
    module = trainer.lightning_module
    for name, value in _plain_hparams(getattr(module, "hparams", None) or {}):
        yield f"hparams.{name}", str(value)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield name, _described(tensor)


def _plain_hparams(hparams: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers and flags: strings may be folders of a host."""
    return ((name, value) for name, value in hparams.items() if isinstance(value, (bool, int, float)))


def _described(tensor: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(tensor):
        return "not yet shaped"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{'' if tensor.requires_grad else ', without gradient'}"


def _code(trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Digests of the source files: the script, the user's classes, the two packages; by the file's name."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    files = [Path(main)] if main else []
    for owner in (trainer.lightning_module, trainer.datamodule):
        files += [Path(file) for cls in type(owner).__mro__ if (file := _source_of(cls))]
    for file in dict.fromkeys(files):
        if "site-packages" not in file.parts and file.is_file():
            yield f"the code of {file.name}", _digest(file)
    for package in (torch_compat, xlatrain):
        root = Path(str(package.__file__)).parent
        digests = "".join(_digest(file) for file in sorted(root.rglob("*.py")))
        yield f"the code of {package.__name__}", _short(digests.encode())


def _source_of(cls: type) -> str | None:
    try:
        return inspect.getsourcefile(cls)
    except TypeError:  # a class that is built in, or made at a prompt
        return None


def _digest(file: Path) -> str:
    return _short(file.read_bytes())


def _short(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()[:12]
