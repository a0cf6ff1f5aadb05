"""What a script's first Trainer imports, and what that costs: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys, torch
from torch._library import utils
searches, original = [], utils.get_source
utils.get_source = lambda level: (searches.append(sys._getframe(level).f_code.co_filename), original(level + 1))[1]
from torch_compat import Trainer
import xlatrain.bridge.lower.interpret
print(sum("/xlatrain/" in one for one in searches), *(name in sys.modules for name in ("optax", "tensorstore")))
import optax
from torch_compat.step.optimizers.optax_optimizer import is_transformation
print(is_transformation(optax.sgd(0.1)), is_transformation(object()))
"""


def test_a_trainer_searches_no_modules_and_imports_neither_optax_nor_tensorstore() -> None:
    """torch's search for the module that registers a fake kernel takes 5 to 30 ms each time, optax 100; TensorStore 15 MiB."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", _SCRIPT], cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["0", "False", "False", "True", "False"]
