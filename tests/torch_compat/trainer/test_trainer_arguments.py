"""Wrong arguments of the Trainer: each error names the argument, what was found and what is expected."""

from __future__ import annotations

from typing import Any

import pytest

from tests import compiling, warm
from torch_compat.loops import _FitLoop
from torch_compat.trainer import Trainer
from torch_compat.utilities.exceptions import MisconfigurationException

WRONG: list[tuple[str, Any, str]] = [
    ("accelerator", "abacus", "Available names are: cpu"),
    ("devices", 0, "positive number"),
    ("devices", "x", "int > 0"),
    ("devices", 1.5, "int > 0"),
    ("num_nodes", 0, "positive integer"),
    ("num_nodes", "a", "positive integer"),
    ("num_nodes", 2, "xlatrain launch --processes 2"),
    ("strategy", "nope", "Choose one of 'auto'"),
    ("strategy", 3, "Expected is a name"),
    ("precision", "17", "Allowed precision values"),
    ("plugins", 3, "Found invalid type for plugin 3. Expected one of: Precision"),
    ("profiler", "other", "it can only be one of"),
    ("profiler", "pytorch", "profiler='xla'"),
    ("model_registry", "name", "save_checkpoint"),
    ("logger", "x", "expected a Logger"),
    ("callbacks", 3, "expected a Callback"),
    ("callbacks", ["x"], "no Callback"),
    ("max_epochs", "3", "non-negative integer or -1"),
    ("max_epochs", -2, "non-negative integer or -1"),
    ("max_steps", -5, "non-negative integer or -1"),
    ("min_epochs", "a", "non-negative int"),
    ("min_steps", -1, "non-negative int"),
    ("max_time", "1:2", "DD:HH:MM:SS"),
    ("limit_train_batches", 1.5, "[0.0, 1.0] or an int"),
    ("limit_val_batches", "a", "a float in [0.0, 1.0]"),
    ("overfit_batches", -1, "[0.0, 1.0] or an int"),
    ("val_check_interval", 1.5, "[0.0, 1.0] or an int"),
    ("check_val_every_n_epoch", 0, "positive integer"),
    ("num_sanity_val_steps", -2, "number of batches"),
    ("log_every_n_steps", -1, "int >= 0"),
    ("accumulate_grad_batches", 0, "positive int"),
    ("gradient_clip_val", "a", "int or a float"),
    ("gradient_clip_algorithm", "other", "['value', 'norm']"),
    ("gradient_clip_algorithm", 3, "['value', 'norm']"),
    ("fast_dev_run", -1, ">= 0"),
    ("deterministic", "x", "True, False or 'warn'"),
    ("detect_anomaly", "x", "bool"),
    ("enable_progress_bar", "a", "True or False"),
    ("inference_mode", "a", "True or False"),
    ("reload_dataloaders_every_n_epochs", -1, "int >= 0"),
    ("default_root_dir", 3, "path"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=lambda value: str(value))
def test_a_wrong_argument_is_named(name: str, value: Any, expected: str) -> None:
    with pytest.raises((MisconfigurationException, TypeError)) as caught:
        Trainer(**{"accelerator": "cpu", "logger": False, name: value})
    message = str(caught.value)
    assert name in message
    assert expected in message
    shown = value[0] if isinstance(value, list) else value
    assert str(shown) in message


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError, match="max_epoch"):
        Trainer(max_epoch=3)  # pyright: ignore[reportCallIssue]


def test_methods_that_only_stock_calls_are_refused() -> None:
    class Own(Trainer):
        def _run_stage(self) -> None: ...

    class Loop(_FitLoop):
        def advance(self) -> None: ...

    quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    with pytest.raises(MisconfigurationException, match="Own overrides _run_stage of stock's Trainer"):
        Own(**quiet)
    with pytest.raises(MisconfigurationException, match="Loop overrides advance of stock's loop"):
        Loop(Trainer(**quiet), None, 1, None, -1)


PICKED = """
from torch_compat import Trainer
print([device.id for device in Trainer(accelerator="cpu", devices=[0, 2], logger=False).strategy.mesh.devices.flat])
"""


def test_cpu_devices_are_picked_by_index_in_a_fresh_process() -> None:
    done = warm.run(warm.OURS, ["-c", PICKED], env=compiling.environment(), timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[0, 2]"], done.stderr


@pytest.mark.parametrize(("given", "warned"), [("2", True), ("4", False)])
def test_a_trainer_that_makes_more_cpu_devices_than_its_process_was_given_says_so(given: str, warned: bool) -> None:
    environment = compiling.environment() | {"JAX_NUM_CPU_DEVICES": given}
    done = warm.run(warm.OURS, ["-c", PICKED], env=environment, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[0, 2]"], done.stderr
    said = f"made 3 CPU devices in each process, but this one was started for {given} (`xlatrain launch"
    assert (said in done.stderr) is warned
