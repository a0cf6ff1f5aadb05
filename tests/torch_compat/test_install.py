"""Import aliases, in subprocesses only: pytest's own process may import the real packages."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
INSTALL = "import torch_compat; torch_compat.install()\n"
REAL_ROOT = """
spec = importlib.util.find_spec("pytorch_lightning")
sys.modules["pytorch_lightning"] = importlib.util.module_from_spec(spec)
"""


def run(*args: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    """Runs Python with ``args`` from ``cwd``; the package is found through the environment, as an installed one would be."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def check(code: str) -> None:
    """Runs ``code`` in a process of its own; fails with its traceback if it raises."""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr


class TestAliases:
    def test_every_spelling_gives_the_same_objects(self) -> None:
        check(
            INSTALL
            + """
import importlib, sys
import pytorch_lightning.callbacks
from lightning.pytorch.callbacks import EarlyStopping
import lightning as L
import lightning.pytorch as pl
import pytorch_lightning
from lightning import pytorch
from lightning.pytorch.callbacks.early_stopping import EarlyStopping as by_file
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities import rank_zero_only as by_pytorch
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
import lightning.pytorch.core.module as module
assert pl is pytorch is L.pytorch is importlib.import_module("lightning.pytorch") is torch_compat
assert L.LightningModule is pl.LightningModule is torch_compat.LightningModule
assert issubclass(pytorch_lightning.LightningModule, pl.LightningModule)  # takes the hooks of every era
assert pytorch_lightning.Trainer is pl.Trainer
assert issubclass(pl.LightningModule, HyperparametersMixin)
assert EarlyStopping is by_file is pl.callbacks.EarlyStopping is L.pytorch.callbacks.EarlyStopping
assert EarlyStopping is pytorch_lightning.callbacks.EarlyStopping
assert rank_zero_only is by_pytorch
assert L.seed_everything is pl.seed_everything and L.Callback is pl.Callback
assert {m.__version__ for m in (L, pl, pytorch_lightning)} == {"2.6.6"}
assert module.__spec__.name == "torch_compat.core.module" and sys.modules[module.__name__] is module
assert not [name for name, m in sys.modules.items() if "site-packages/lightning/" in (getattr(m, "__file__", "") or "")]
"""
        )

    @pytest.mark.parametrize(
        "statement",
        [
            "import lightning.pytorch",
            "import pytorch_lightning",
            "import lightning.fabric",
            "import lightning.pytorch.core.hparams, torch_compat.core.hparams",
            "import importlib; importlib.import_module('pytorch_lightning.utilities.warnings')",
        ],
    )
    def test_any_of_them_may_come_first(self, statement: str) -> None:
        check(f"{INSTALL}{statement}\nimport lightning, lightning.pytorch as pl\nassert pl is lightning.pytorch is torch_compat")

    def test_installing_twice_does_nothing(self) -> None:
        check(f"import sys\n{INSTALL}n = len(sys.meta_path)\n{INSTALL}assert len(sys.meta_path) == n")

    def test_both_spellings_of_install_work(self) -> None:
        check(
            "from torch_compat.install import install\nimport torch_compat\ntorch_compat.install()\ninstall()\nimport lightning"
        )

    def test_torchmetrics_sees_nothing_odd(self) -> None:
        check(
            INSTALL
            + """
import lightning.pytorch as pl, torchmetrics, torch
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
module = Module()
module.mean.update(torch.tensor(3.0))
assert module.mean.compute() == 3 and module._metric_attribute(module.mean) == "mean"
"""
        )


class TestWhatIsMissing:
    @pytest.mark.parametrize("name", ["lightning.pytorch.nonsense", "pytorch_lightning.nonsense", "lightning.app"])
    def test_is_an_import_error_that_names_it(self, name: str) -> None:
        result = run("-c", f"{INSTALL}import {name}")
        assert result.returncode == 1
        assert f"ModuleNotFoundError: `{name}` is not offered in this version of torch_compat" in result.stderr

    def test_a_library_can_ask_without_an_error(self) -> None:
        check(
            INSTALL
            + """
from lightning_utilities.core.imports import module_available
assert module_available("lightning.pytorch") and not module_available("lightning.pytorch.nonsense")
"""
        )

    def test_a_real_package_that_was_imported_before_is_an_error(self) -> None:
        if importlib.util.find_spec("pytorch_lightning") is None:
            pytest.skip("needs the real package")
        # Its root module only, for speed: what counts is where the module came from.
        result = run("-c", f"import importlib.util, sys\n{REAL_ROOT}{INSTALL}")
        assert result.returncode == 1
        assert "ImportError: `pytorch_lightning` was imported from" in result.stderr
        assert "before `torch_compat.install()`" in result.stderr
        assert "python -m torch_compat" in result.stderr


class TestImportIsCheap:
    def test_the_package_loads_neither_torch_nor_jax(self) -> None:
        check(f"import sys\n{INSTALL}import lightning.pytorch\nassert not {{'torch', 'jax'}} & set(sys.modules)")

    def test_modules_start_no_jax_backend(self) -> None:
        check(
            INSTALL
            + """
import sys
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.model_summary import ModelSummary
bridge = sys.modules.get("jax._src.xla_bridge")
assert bridge is None or not bridge._backends
"""
        )


WORKER_SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import lightning.pytorch as pl
from pytorch_lightning.utilities import rank_zero_only

class Rows(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        import lightning.pytorch as again
        assert again is pl and "torch_compat" in pl.__file__
        return torch.tensor(index)

if __name__ == "__main__":
    loader = DataLoader(Rows(), num_workers=1, multiprocessing_context=sys.argv[1])
    print([int(row) for row in loader])
"""

# Under the guard, the child does not run the call itself.
INSTALLING_SCRIPT = """
import multiprocessing

def child(queue):
    import lightning
    queue.put(lightning.__file__)

if __name__ == "__main__":
    import torch_compat
    torch_compat.install()
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print("torch_compat" in queue.get())
    process.join()
"""


class TestChildProcesses:
    @pytest.mark.parametrize("context", ["spawn", "forkserver"])
    def test_dataloader_workers_unpickle_a_dataset_of_main(self, tmp_path: Path, context: str) -> None:
        (tmp_path / "train.py").write_text(WORKER_SCRIPT)
        result = run("-m", "torch_compat", "train.py", context, cwd=tmp_path)
        assert result.stdout.strip() == "[0, 1, 2]", result.stderr

    def test_children_of_a_script_that_installs_for_itself(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(INSTALLING_SCRIPT)
        result = run("train.py", cwd=tmp_path)
        assert result.stdout.strip() == "True", result.stderr


def test_attributes_of_torch_that_stocks_import_makes() -> None:
    check(
        INSTALL
        + """
import lightning
lightning.LightningModule
import torch
torch.nn.utils.prune, torch.nn.attention.flex_attention, torch.utils.flop_counter
torch.distributed.fsdp.FullyShardedDataParallel, torch.distributed.tensor.DTensor
"""
    )
