"""Our own parts of `LightningCLI`: import paths, choices, refusals. The rest is compared in tests/parity/scripts/cli.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_compat.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from torch_compat.cli.import_paths import as_imported
from torch_compat.core.module import LightningModule
from torch_compat.demos.boring_classes import BoringModel
from torch_compat.plugins import MixedPrecision
from torch_compat.profilers import AdvancedProfiler
from torch_compat.stock_names.aliases import AliasFinder
from torch_compat.strategies import DDPStrategy, FSDPStrategy

CONFIG = "class_path: torch_compat.callbacks.EarlyStopping\npath: /home/torch_compat.x/y\nmine: my_torch_compat.Net\n"


def test_import_paths_are_spelled_as_the_script_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning"):  # other tests of this process may have called `install()`
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, AliasFinder)])
    assert as_imported(CONFIG) == CONFIG  # nobody called `install()`: Lightning's names are not ours
    monkeypatch.setattr(sys, "meta_path", [AliasFinder(), *sys.meta_path])
    spelled = CONFIG.replace("torch_compat.callbacks", "lightning.pytorch.callbacks")
    assert as_imported(CONFIG) == spelled
    assert as_imported("torch_compat.fabric.strategies.X") == "lightning.fabric.strategies.X"
    monkeypatch.setitem(sys.modules, "pytorch_lightning", sys)
    assert as_imported(CONFIG) == CONFIG.replace("torch_compat.callbacks", "pytorch_lightning.callbacks")


def made(*arguments: str, model: Any = BoringModel) -> LightningCLI:
    """The objects of a command line."""
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    return LightningCLI(model, args=list(arguments), run=False, trainer_defaults=quiet, seed_everything_default=False)


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command line, as in a script that was started without arguments."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


def test_strategies_profilers_and_plugins_by_name() -> None:
    strategy = ["--trainer.strategy=FSDPStrategy", "--trainer.strategy.device_mesh=[2,4]", "--trainer.devices=8"]
    profiler = ["--trainer.profiler=torch_compat.profilers.AdvancedProfiler", "--trainer.profiler.filename=times"]
    plugin = ["--trainer.plugins=MixedPrecision", "--trainer.plugins.precision=bf16-mixed"]
    cli = made(*strategy, "--trainer.strategy.sharding_strategy=HYBRID_SHARD", *profiler, *plugin)
    assert isinstance(cli.trainer.strategy, FSDPStrategy)
    assert dict(cli.trainer.strategy.mesh.shape) == {"data": 2, "fsdp": 4}
    assert isinstance(cli.trainer.profiler, AdvancedProfiler)
    assert cli.trainer.profiler.filename == "times"
    assert isinstance(cli.trainer.precision_plugin, MixedPrecision)
    ddp = ["--trainer.strategy=DDPStrategy", "--trainer.strategy.find_unused_parameters=true"]  # from a call in its constructor
    assert isinstance(made(*ddp).trainer.strategy, DDPStrategy)
    assert [type(callback) for callback in cli.trainer.callbacks].count(SaveConfigCallback) == 1


def test_a_precision_that_does_not_exist_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        made("--trainer.precision=8-true")
    assert end.value.code == 2
    assert "bf16-mixed" in capsys.readouterr().err


def make_model(scale: float = 2.0) -> BoringModel:
    model = BoringModel()
    with torch.no_grad():
        model.layer.weight.fill_(scale)
    return model


def make_anything(scale: float = 2.0):
    return BoringModel()


def test_a_function_may_make_the_model_if_it_says_what_it_returns() -> None:
    cli = made("--model.scale=3", model=make_model)
    assert torch.equal(cli.model.layer.weight, torch.full_like(cli.model.layer.weight, 3.0))
    with pytest.raises(ValueError, match=r"make_anything.* does not have a return type annotation"):
        made(model=make_anything)


def test_arguments_and_a_command_line_at_once_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--trainer.max_epochs=3"])
    with pytest.warns(UserWarning, match=r"--trainer\.max_epochs=3.* is ignored"):
        cli = made("--trainer.max_epochs=2")
    assert cli.trainer.max_epochs == 2


def test_optimizers_and_schedulers_must_be_such() -> None:
    parser = LightningArgumentParser()
    with pytest.raises(TypeError, match=r"'optimizer': expected a subclass of Optimizer, found .*Linear"):
        parser.add_optimizer_args(torch.nn.Linear)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected a subclass of LRScheduler or ReduceLROnPlateau"):
        parser.add_lr_scheduler_args((torch.optim.SGD,))  # pyright: ignore[reportArgumentType]


def test_a_checkpoint_cannot_choose_what_makes_the_module(tmp_path: Path) -> None:
    path = tmp_path / "foreign.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {"_instantiator": "os.system"}}, path)
    with pytest.raises(ValueError, match=r"made by 'os\.system'; known: lightning\.pytorch\.cli\.instantiate_module"):
        LightningModule.load_from_checkpoint(path)
