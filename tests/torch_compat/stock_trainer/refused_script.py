"""What stock's Trainer with a MeshStrategy refuses, as JSON: case → the error's text."""

import ctypes
import json
import signal
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

from xlatrain.lightning import MeshStrategy

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Scaled(BoringModel):
    def on_before_backward(self, loss):
        loss.mul_(2)


class Manual(BoringModel):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_end(self, *args):
        self.manual_backward(self.layer.weight.sum())


def error_of(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def trainer(**options):
    return pl.Trainer(strategy=MeshStrategy(), max_steps=1, limit_val_batches=0, **QUIET, **options)


def status(name):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(lines[name], 16) >> (signal.SIGPROF - 1) & 1)


def signals():
    """Whether SIGPROF, ignored behind Python's back as by libtpu, is still ignored after a run."""
    from torch_compat.stock_trainer.accelerator import jax_devices

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a test process that has loaded libtpu ignores it, and so do its children
    ctypes.CDLL(None).signal(int(signal.SIGPROF), ctypes.c_void_p(1))  # SIG_IGN, behind Python's back, as libtpu does it
    assert status("SigIgn") and signal.getsignal(signal.SIGPROF) is signal.SIG_DFL
    jax_devices(1)
    trainer().fit(BoringModel())
    return "ignored" if status("SigIgn") else "not ignored"


print(
    json.dumps(
        {
            "num_nodes": error_of(lambda: trainer(num_nodes=2)),
            "precision": error_of(lambda: trainer(precision="16-mixed")),
            "loss": error_of(lambda: trainer().fit(Scaled())),
            "manual": error_of(lambda: trainer().fit(Manual())),
            "signals": signals(),
        }
    )
)
