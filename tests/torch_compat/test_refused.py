"""Names of stock without a meaning here: they can be imported, and raise where they are used, with what to use instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_compat import accelerators, plugins, strategies
from torch_compat.plugins import FSDPPrecision, HalfPrecision, MixedPrecision
from torch_compat.plugins.collectives import TorchCollective
from torch_compat.strategies import Strategy
from torch_compat.trainer.migration import migrate_checkpoint
from torch_compat.utilities.exceptions import MisconfigurationException


def test_a_class_raises_when_it_or_a_subclass_is_made() -> None:
    deepspeed: Any = strategies.DeepSpeedStrategy
    assert deepspeed is strategies.DeepSpeedStrategy
    assert issubclass(deepspeed, Strategy)
    mine = type("Mine", (deepspeed,), {"__init__": lambda self: None})
    for make in (lambda: deepspeed(stage=3), mine):
        with pytest.raises(MisconfigurationException, match=r"lightning\.pytorch\.strategies\.DeepSpeedStrategy .*FSDPStrategy"):
            make()


def test_a_function_raises_when_it_is_called() -> None:
    with pytest.raises(MisconfigurationException, match=r"remove_module_hooks is not offered on an XLA mesh: .*FSDPStrategy"):
        strategies.remove_module_hooks(torch.nn.Linear(1, 1))


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match=r"'torch_compat\.strategies' has no attribute 'Other'"):
        strategies.Other  # noqa: B018  # pyright: ignore


def test_precision_by_strategy_is_the_precision_of_its_dtypes() -> None:
    assert isinstance(FSDPPrecision("bf16-mixed"), MixedPrecision)
    half = FSDPPrecision("bf16-true")
    assert isinstance(half, HalfPrecision)
    assert half.convert_input(torch.ones(1)).dtype is torch.bfloat16
    assert half.convert_module(torch.nn.Linear(1, 1)).weight.dtype is torch.bfloat16
    with pytest.raises(ValueError, match=r"64-true.*not supported in FSDP"):
        FSDPPrecision("64-true")
    with pytest.raises(ModuleNotFoundError, match=r"torch_xla.*Trainer\(precision='bf16-true'\)"):
        plugins.XLAPrecision("bf16-true")


def test_an_accelerator_that_is_never_there_says_so() -> None:
    assert not accelerators.MPSAccelerator.is_available()
    with pytest.raises(MisconfigurationException, match="accelerator='cpu'"):
        accelerators.MPSAccelerator()


def test_collectives_of_one_process() -> None:
    collective = TorchCollective().setup().create_group()
    value = torch.tensor([1.0, 2.0])
    assert collective.all_reduce(value, "sum") is value
    assert collective.all_gather([torch.zeros(2)], value)[0].tolist() == [1.0, 2.0]
    assert collective.scatter_object_list([None], ["mine"]) == ["mine"]
    with pytest.raises(ValueError, match="one for each process"):
        collective.all_gather([torch.zeros(2), torch.zeros(2)], value)
    with pytest.raises(MisconfigurationException, match="leave it out"):
        collective.new_group(ranks=[0, 1])
    with pytest.raises(RuntimeError, match="does not own a group"):
        collective.teardown().teardown()


def test_a_checkpoint_of_1x_with_loops_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"Lightning 1\.5\.0 .*upgrade_checkpoint.*load_from_checkpoint"):
        migrate_checkpoint({"pytorch-lightning_version": "1.5.0", "loops": {}})
    checkpoint, changes = migrate_checkpoint({"pytorch-lightning_version": "2.1.0", "loops": {}})
    assert (checkpoint["pytorch-lightning_version"], changes) == ("2.6.6", {})
