"""Nothing that a checkpoint names is imported or called, unless the module's annotations say so, or the caller consents."""

from __future__ import annotations

import collections
import fractions
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.hostile.named_classes import Block, Victim, attempts, hyperparameters, saboteur, was_harmed, write
from torch_compat.checkpoint.untrusted import UntrustedValueError
from torch_compat.cli import LightningCLI


@pytest.fixture(autouse=True)
def on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saboteur(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv[:1])


def test_nothing_that_a_file_names_runs(tmp_path: Path) -> None:
    outcomes = collections.Counter(outcome for _, _, outcome in attempts(tmp_path, range(0, 1900, 17)))
    assert outcomes["UntrustedValueError"] > sum(outcomes.values()) / 3, outcomes


class Validates(LightningCLI):
    """Makes the objects, and validates nothing."""

    def validate(self, **_: Any) -> None:
        pass


@pytest.mark.parametrize("parameter", ["untyped", "function", "many"])
def test_a_command_line_does_not_run_it_either(parameter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker, outcomes = tmp_path / "harmed", collections.Counter()
    found = [arguments for arguments in hyperparameters(marker) if parameter in arguments]
    for number, arguments in enumerate(found[::19]):
        path = write(tmp_path / f"{number}.ckpt", arguments, directory=False)
        try:
            Validates(Victim, args=["validate", f"--ckpt_path={path}", *QUIET], seed_everything_default=False)
        except (UntrustedValueError, SystemExit) as error:
            outcomes[type(error)] += 1
        assert not was_harmed(marker), arguments
    assert outcomes[UntrustedValueError], outcomes
    assert "import_path_allowlist" not in capsys.readouterr().err  # jsonargparse's advice is not ours


QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.barebones=true"]


def saved(path: Path, **arguments: Any) -> Path:
    return write(path, arguments, directory=False)


def test_what_the_annotation_says_is_made(tmp_path: Path) -> None:
    spec = {"class_path": "torch.nn.Linear", "init_args": {"in_features": 2, "out_features": 3}}
    nested = {"class_path": f"{Block.__module__}.Block", "init_args": {"width": 4}}
    made = Victim.load_from_checkpoint(saved(tmp_path / "a.ckpt", block=spec, block_kind="torch.nn.Tanh", untyped="os.system"))
    assert isinstance(made.given["block"], nn.Linear)
    assert made.given["block_kind"] is nn.Tanh
    assert made.given["untyped"] == "os.system"  # a text is a text
    assert isinstance(Victim.load_from_checkpoint(saved(tmp_path / "b.ckpt", block=nested)).given["block"], Block)


def test_the_error_says_what_is_named_and_how_to_consent(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", untyped={"class_path": "fractions.Fraction", "init_args": {"numerator": 3}})
    with pytest.raises(UntrustedValueError, match=r"a\.ckpt' name 'fractions\.Fraction', which is a class that no annotation"):
        Victim.load_from_checkpoint(path)
    assert Victim.load_from_checkpoint(path, weights_only=False).given["untyped"] == 3
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert Victim.load_from_checkpoint(path).given["untyped"] == 3


def test_what_the_caller_names_is_the_callers(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.ckpt", anything=1)
    made = Victim.load_from_checkpoint(path, function="torch.nn.functional.relu")
    assert made.given["function"] is torch.nn.functional.relu


def test_the_container_of_hyperparameters_is_a_container(tmp_path: Path) -> None:
    """``hparams_type`` is called, too."""
    path = tmp_path / "a.ckpt"
    state = {"state_dict": Victim().state_dict(), "hyper_parameters": {"untyped": 1}, "hparams_type": torch.nn.Parameter}
    torch.save(state, path)
    assert Victim.load_from_checkpoint(path).given["untyped"] == 1
