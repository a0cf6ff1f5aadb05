"""ModelSummary against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from torch_compat.core.module import LightningModule
from torch_compat.utilities.model_summary import ModelSummary, get_human_readable_count, parse_batch_shape, summarize


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)
        self.net = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 2))
        self.net[0].requires_grad_(False)
        self.net[2].eval()
        self.tied = self.layer
        self.scale = nn.Parameter(torch.ones(3, 3))
        self.example_input_array: Any = torch.ones(4, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.net(x)


def test_table() -> None:
    assert str(ModelSummary(Module())) == (
        "  | Name         | Type       | Params | Mode  | FLOPs | In sizes | Out sizes\n"
        "-----------------------------------------------------------------------------------\n"
        "0 | layer        | Linear     | 66     | train | 512   | [4, 32]  | [4, 2]   \n"
        "1 | net          | Sequential | 282    | train | 2.2 K | [4, 32]  | [4, 2]   \n"
        "  | other params | n/a        | 9      | n/a   | n/a   | n/a      | n/a      \n"
        "-----------------------------------------------------------------------------------\n"
        "93        Trainable params\n"
        "264       Non-trainable params\n"
        "357       Total params\n"
        "0.001     Total estimated model params size (MB)\n"
        "4         Modules in train mode\n"
        "1         Modules in eval mode\n"
        "2.7 K     Total Flops"
    )


@pytest.mark.parametrize(
    ("depth", "names"),
    [
        (0, []),
        (1, ["layer", "net"]),
        (2, ["layer", "net", "net.0", "net.1", "net.2"]),
        (-1, ["layer", "net", "net.0", "net.1", "net.2"]),
    ],
)
def test_depth(depth: int, names: list[str]) -> None:
    summary = summarize(Module(), max_depth=depth)
    assert summary.layer_names == names
    # A parameter is counted once, however many lines show it.
    assert summary.total_parameters - summary.total_layer_params == (9 if depth else 357)


def test_forward_leaves_the_module_as_it_was() -> None:
    module = Module()
    modes = [child.training for child in module.modules()]
    ModelSummary(module)
    assert [child.training for child in module.modules()] == modes
    assert not any(child._forward_hooks for child in module.modules())


@pytest.mark.parametrize("example", [(torch.ones(4, 32),), {"x": torch.ones(4, 32)}])
def test_examples_of_several_arguments(example: Any) -> None:
    module = Module()
    module.example_input_array = example
    assert ModelSummary(module).in_sizes == [[4, 32], [4, 32]]


def test_without_an_example_there_are_no_sizes() -> None:
    module = Module()
    module.example_input_array = None
    headers = [header for header, _ in ModelSummary(module)._get_summary_data()]
    assert headers == [" ", "Name", "Type", "Params", "Mode", "FLOPs"]


def test_uninitialised_parameters_are_warned_of() -> None:
    module = LightningModule()
    module.lazy = nn.LazyLinear(3)
    with pytest.warns(UserWarning, match="`UninitializedParameter`"):
        summary = ModelSummary(module)
    assert summary.total_parameters == 0
    assert summary.model_size == 0


@pytest.mark.parametrize("depth", [-2, "all"])
def test_wrong_depth(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"`max_depth` can be -1, 0 or > 0, got {depth}"):
        ModelSummary(Module(), max_depth=depth)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0  "), (123, "123  "), (1234, "1.2 K"), (123456, "123 K"), (10**9, "1.0 B"), (35 * 10**14, "3,500 T")],
)
def test_counts(number: int, text: str) -> None:
    assert get_human_readable_count(number) == text


def test_shapes() -> None:
    assert parse_batch_shape((torch.zeros(3), [torch.zeros(2, 2)])) == [[3], [[2, 2]]]
    assert parse_batch_shape({"a": torch.zeros(1)}) == "?"
