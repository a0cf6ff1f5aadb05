"""The small helpers that users import from ``lightning.pytorch.utilities``."""

from __future__ import annotations

import functools
import importlib
import logging
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torch_compat.utilities
from torch_compat.callbacks import Callback
from torch_compat.callbacks.overridden import is_overridden
from torch_compat.core.compile import from_compiled, to_uncompiled
from torch_compat.core.module import LightningModule
from torch_compat.demos.boring_classes import BoringDataModule, BoringModel, RandomDataset, RandomIterableDatasetWithLen
from torch_compat.run import hook_calls
from torch_compat.trainer.trainer import Trainer
from torch_compat.utilities import grad_norm, measure_flops, move_data_to_device
from torch_compat.utilities.data import extract_batch_size, has_len, suggested_max_num_workers
from torch_compat.utilities.device_transfer import convert_tensors_to_scalars, convert_to_tensors
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.memory import is_oom_error, recursive_detach
from torch_compat.utilities.parameter_tying import find_shared_parameters, set_shared_parameters
from torch_compat.utilities.parsing import clean_namespace, lightning_getattr, lightning_hasattr, lightning_setattr
from torch_compat.utilities.rank_zero import rank_zero_info
from torch_compat.utilities.shared_filesystem import is_shared_filesystem
from torch_compat.utilities.signature_utils import is_param_in_hook_signature


@pytest.mark.parametrize("name", torch_compat.utilities.__all__)
def test_every_listed_name_is_there(name: str) -> None:
    assert getattr(importlib.import_module("torch_compat.utilities"), name) is not None


class TestGradNorm:
    @pytest.mark.parametrize("norm_type", [1, 2.0, "inf"])
    def test_norms(self, norm_type: Any) -> None:
        model = nn.Linear(3, 2)
        model(torch.full((1, 3), 2.0)).sum().backward()
        norms = grad_norm(model, norm_type)
        p = float(norm_type)
        weight, bias = torch.full((6,), 2.0), torch.ones(2)
        assert norms.pop(f"grad_{p}_norm/weight") == weight.norm(p)
        assert norms.pop(f"grad_{p}_norm/bias") == bias.norm(p)
        torch.testing.assert_close(norms.pop(f"grad_{p}_norm_total"), torch.cat([weight, bias]).norm(p))
        assert norms == {}

    def test_without_gradients(self) -> None:
        assert grad_norm(nn.Linear(1, 1), 2) == {}

    def test_wrong_norm(self) -> None:
        with pytest.raises(ValueError, match="positive number or 'inf'"):
            grad_norm(nn.Linear(1, 1), 0)


def test_flops_count_a_multiply_add_as_two() -> None:
    model = nn.Linear(3, 5)
    batch = torch.ones(4, 3)
    assert measure_flops(model, lambda: model(batch)) == 2 * 4 * 3 * 5
    assert measure_flops(model, lambda: model(batch), lambda y: y.sum()) == 2 * 2 * 4 * 3 * 5


@dataclass
class Pair:
    a: Any
    b: Any


class TestBatchSize:
    @pytest.mark.parametrize(
        ("batch", "size"),
        [
            (torch.ones(3, 2), 3),
            (torch.tensor(1.0), 1),
            ({"text": "abc", "x": torch.ones(4)}, 4),
            (Pair(torch.ones(5), 1), 5),
            (["ab", [torch.ones(2)], None], 2),
            (torch.ones(0, 2), 0),
        ],
    )
    def test_sizes(self, batch: Any, size: int) -> None:
        assert extract_batch_size(batch) == size

    def test_tensors_that_disagree(self) -> None:
        with pytest.warns(UserWarning, match="ambiguous collection: 31 is taken"):
            assert extract_batch_size([torch.ones(31), torch.ones(4)]) == 31

    @pytest.mark.parametrize("batch", [[1, 2], {}, None, "ab", object()])
    def test_nothing_with_a_size(self, batch: Any) -> None:
        with pytest.raises(MisconfigurationException, match="could not infer the batch_size"):
            extract_batch_size(batch)


class TestDeviceTransfer:
    def test_nested_data_keeps_its_structure(self) -> None:
        class Batch:
            def __init__(self) -> None:
                self.device = "nowhere"

            def to(self, device: torch.device) -> None:
                self.device = str(device)

        own = Batch()
        moved = move_data_to_device({"pair": Pair(torch.ones(1), "x"), "own": own, "list": (torch.ones(2),)}, "meta")
        assert moved["pair"].a.is_meta
        assert moved["pair"].b == "x"
        assert moved["own"] is own
        assert own.device == "meta"
        assert moved["list"][0].is_meta

    def test_a_tensor_that_is_there_is_not_copied(self) -> None:
        tensor = torch.ones(1)
        assert move_data_to_device([tensor], torch.device("cpu"))[0] is tensor

    def test_conversions(self) -> None:
        tensors = convert_to_tensors({"i": 1, "f": 2.5, "b": True, "n": np.ones(2), "s": "x"}, "cpu")
        assert [tensors[key].dtype for key in "ifbn"] == [torch.int32, torch.float32, torch.uint8, torch.float64]
        assert tensors["s"] == "x"
        assert convert_tensors_to_scalars({"a": [torch.tensor(2)], "b": 3}) == {"a": [2], "b": 3}
        with pytest.raises(ValueError, match="does not contain a single element"):
            convert_tensors_to_scalars(torch.ones(2))


def test_lengths() -> None:
    assert has_len(DataLoader(RandomDataset(1, 3)))
    with pytest.warns(UserWarning, match="returned 0 length"):
        assert has_len(DataLoader(RandomDataset(1, 0)))
    with pytest.warns(UserWarning, match="`IterableDataset` has `__len__` defined"):
        assert has_len(DataLoader(RandomIterableDatasetWithLen(1, 3)))
    assert not has_len(iter([1]))
    assert suggested_max_num_workers(1000) == 1
    with pytest.raises(ValueError, match="should be >= 1, got 0"):
        suggested_max_num_workers(0)


def test_is_overridden() -> None:
    model = BoringModel()
    assert is_overridden("training_step", model)
    assert not is_overridden("on_fit_start", model)
    assert not is_overridden("training_step", None)
    assert is_overridden("train_dataloader", BoringDataModule())
    assert not is_overridden("on_fit_start", Callback())
    with pytest.raises(ValueError, match="found Linear"):
        is_overridden("forward", nn.Linear(1, 1))
    with pytest.raises(ValueError, match="LightningModule does not define `layer`"):
        is_overridden("layer", model)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda function: functools.partial(function),
        lambda function: functools.update_wrapper(functools.partial(lambda call, *args: call(*args), function), function),
        lambda function: functools.wraps(function)(lambda *args: function(*args)),
        lambda function: Mock(wraps=function),
    ],
    ids=["partial", "partial with update_wrapper", "wraps", "mock"],
)
def test_a_wrapped_hook_is_not_overridden_and_is_called(wrap: Callable[[Any], Any]) -> None:
    model = BoringModel()
    for name in ("on_fit_start", "configure_model", "training_step"):
        setattr(model, name, wrap(getattr(model, name)))
        assert is_overridden(name, model) == hook_calls.is_overridden(name, model) == (name == "training_step")
        assert hook_calls.has_own(name, model)


def test_a_hook_that_is_put_in_place_of_another_is_overridden() -> None:
    model = BoringModel()
    model.on_fit_start = lambda: None
    assert is_overridden("on_fit_start", model)
    assert hook_calls.is_overridden("on_fit_start", model)
    model.on_fit_start = Mock()  # stands for nothing
    assert not is_overridden("on_fit_start", model)
    assert not hook_calls.is_overridden("on_fit_start", model)
    assert hook_calls.has_own("on_fit_start", model)


def test_parameters_in_signatures() -> None:
    def hook(self: object, a: int, b: int) -> None: ...

    def anything(*args: int) -> None: ...

    assert is_param_in_hook_signature(hook, "a")
    assert not is_param_in_hook_signature(hook, "z")
    assert is_param_in_hook_signature(hook, "z", min_args=2)
    assert not is_param_in_hook_signature(hook, "z", min_args=3)
    assert is_param_in_hook_signature(anything, "z")
    assert not is_param_in_hook_signature(anything, "z", explicit=True)
    assert is_param_in_hook_signature(BoringModel().training_step, "batch", explicit=True)


def test_tied_parameters() -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(2, 2), nn.Linear(2, 2)
    model.b.weight = model.a.weight
    shared = find_shared_parameters(model)
    assert shared == [["a.weight", "b.weight"]]
    model.b.weight = nn.Parameter(torch.zeros(2, 2))
    assert set_shared_parameters(model, shared).b.weight is model.a.weight


def test_attributes_by_name() -> None:
    model = LightningModule()
    model.hparams.update(rate=1)
    model.size = 2
    assert lightning_hasattr(model, "rate")
    assert not lightning_hasattr(model, "nothing")
    lightning_setattr(model, "rate", 5)
    lightning_setattr(model, "size", 6)
    assert (lightning_getattr(model, "rate"), model.hparams.rate, model.size) == (5, 5, 6)
    for use in (lambda: lightning_getattr(model, "nothing"), lambda: lightning_setattr(model, "nothing", 1)):
        with pytest.raises(AttributeError, match="nothing is neither stored in the model namespace"):
            use()


def test_clean_namespace() -> None:
    hparams: dict[str, Any] = {"rate": 1, "function": lambda: 1}
    with pytest.warns(UserWarning, match="Attribute 'function' removed from hparams"):
        clean_namespace(hparams)
    assert hparams == {"rate": 1}


def test_memory() -> None:
    tensor = torch.ones(1, requires_grad=True)
    detached = recursive_detach({"a": [tensor], "b": 1})
    assert not detached["a"][0].requires_grad
    assert detached["b"] == 1
    assert is_oom_error(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"))
    assert is_oom_error(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not is_oom_error(RuntimeError("something else"))


def test_compiled_modules() -> None:
    model = BoringModel()
    assert from_compiled(torch.compile(model)) is model
    assert to_uncompiled(torch.compile(model)) is model
    with pytest.raises(ValueError, match=r"required to be a `OptimizedModule`\. Found a `BoringModel`"):
        from_compiled(model)
    with pytest.raises(ValueError, match="Found an uncompiled `BoringModel`"):
        to_uncompiled(model)
    with pytest.raises(ValueError, match=r"expected to be a compiled LightningModule\. Found a `Linear`"):
        from_compiled(torch.compile(nn.Linear(1, 1)))


def test_shared_filesystem_on_one_process(tmp_path: Path) -> None:
    strategy = Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False).strategy
    assert is_shared_filesystem(strategy, tmp_path)
    assert is_shared_filesystem(strategy, "gs://bucket/folder")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        is_shared_filesystem(strategy, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_namespace_is_picklable() -> None:
    assert torch_compat.utilities.is_picklable(Namespace(a=1))
    assert not torch_compat.utilities.is_picklable(lambda: 1)


def test_messages_are_silenced_by_either_name(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("lightning.pytorch")
    monkeypatch.setattr(logger, "propagate", True)
    rank_zero_info("first")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        silenced = logging.getLogger(name)
        before = silenced.level
        silenced.setLevel(logging.ERROR)
        rank_zero_info("unheard")
        silenced.setLevel(before)
    rank_zero_info("last")
    assert [record.message for record in caplog.records] == ["first", "last"]
