"""FSDPStrategy's arguments: followed, or refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.utils.data import DataLoader, TensorDataset

from tests.torch_compat.strategies.small import Net, trainer
from torch_compat.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
from torch_compat.strategies import FSDPStrategy
from torch_compat.utilities.exceptions import MisconfigurationException


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def model() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(4, 4), Block())


POLICIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "classes": ({"activation_checkpointing_policy": {Block, nn.Linear}}, ["0", "1", "2"]),
    "a class": ({"activation_checkpointing": Block}, ["0", "2"]),
    "a list": ({"activation_checkpointing": [Block]}, ["0", "2"]),
    "an object": ({"activation_checkpointing_policy": ModuleWrapPolicy({Block})}, ["0", "2"]),
    "a custom one": ({"activation_checkpointing_policy": CustomPolicy(lambda m: isinstance(m, Block))}, ["0", "2"]),
    "a function": (
        {"activation_checkpointing_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
        ["0", "2"],
    ),
    "by size": (  # bottom up: what is taken inside does not count again
        {"activation_checkpointing_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=40)},
        ["0.inner", "2.inner"],
    ),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("what", POLICIES)
def test_what_is_recomputed(what: str) -> None:
    options, expected = POLICIES[what]
    root = model()
    of = {id(module): path for path, module in root.named_modules()}
    for kind in (FSDPStrategy, lambda **given: FabricFSDPStrategy(**given).mesh_strategy):
        assert [of[id(module)] for module in kind(**options).recomputed_modules(root)] == expected


def test_a_policy_that_matches_nothing_says_so() -> None:
    with pytest.warns(UserWarning, match="matches no module of Sequential: nothing is recomputed"):
        assert FSDPStrategy(activation_checkpointing_policy={nn.Conv2d}).recomputed_modules(model()) == []


def test_a_run_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy reaches the captured step, and the weights are those without it."""
    recomputed: list[str] = []
    real = torch.utils.checkpoint.checkpoint

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        recomputed.append(type(function.__self__).__name__)
        return real(function, *args, **kwargs)

    data = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), 2)
    nets = []
    for policy in (None, {nn.Linear}):
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
        trainer(strategy=FSDPStrategy(activation_checkpointing_policy=policy), max_steps=1).fit(net := Net(), data)
        nets.append(net)
        assert bool(recomputed) == (policy is not None)
    torch.testing.assert_close(nets[0].net.weight, nets[1].net.weight)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cpu_offload": ({"cpu_offload": True}, r"FSDPStrategy\(cpu_offload=…\) is not supported .* offload='optimizer' keeps"),
    "mixed_precision": ({"mixed_precision": MixedPrecision(torch.bfloat16)}, r"mixed_precision=….*precision='bf16-mixed'"),
    "both": ({"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}}, "mean the same; give one"),
    "state_dict_type": ({"state_dict_type": "local"}, "expected 'full' or 'sharded'"),
    "sharding_strategy": ({"sharding_strategy": "SOME_SHARD"}, "expected one of FULL_SHARD"),
    "device_mesh": ({"device_mesh": 8}, "expected two sizes"),
    "param_init_fn": ({"param_init_fn": nn.Module.to_empty}, "param_init_fn=….*values of their own constructors"),
    "unknown": ({"use_orig_param": True}, r"unexpected arguments \['use_orig_param'\]"),
    "hybrid": ({"sharding_strategy": "HYBRID_SHARD"}, "at least one of the parameters: .*`device_mesh`"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    options, text = REFUSED[what]
    with pytest.raises((MisconfigurationException, ValueError, TypeError), match=text):
        FSDPStrategy(**options)
