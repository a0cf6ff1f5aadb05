"""Utilities that are about modules: summaries, shared parameters, counts of operations, norms of gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from answering import ask, ask_each, attempt
from lightning.fabric.utilities.throughput import get_available_flops, measure_flops
from lightning.pytorch.loops.utilities import check_finite_loss
from lightning.pytorch.utilities import (
    find_shared_parameters,
    grad_norm,
    set_shared_parameters,
)
from lightning.pytorch.utilities.compile import from_compiled, to_uncompiled
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import (
    get_formatted_model_size,
    get_human_readable_count,
    parse_batch_shape,
    summarize,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn


class Net(pl.LightningModule):
    example_input_array = torch.ones(2, 4)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale


class Recurrent(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.embed = nn.Embedding(10, 3)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


ask_each(
    summary=lambda: str(ModelSummary(Net(), max_depth=-1)),
    summary_shallow=lambda: [str(summarize(Net())), str(ModelSummary(Net(), max_depth=0)), str(ModelSummary(Net(), 2))],
    summary_without_example=lambda: str(ModelSummary(Recurrent())),
    summary_wrong_depth=lambda: ModelSummary(Net(), max_depth=-2),
    summary_text_depth=lambda: ModelSummary(Net(), max_depth="top"),
    summary_of_linear=lambda: ModelSummary(nn.Linear(1, 1)),
    summary_members=lambda: [
        getattr(ModelSummary(Net(), 2), name)
        for name in (
            *("layer_names", "layer_types", "in_sizes", "out_sizes", "param_nums", "training_modes", "total_parameters"),
            *("trainable_parameters", "total_layer_params", "model_size", "total_flops", "flop_counts", "total_training_modes"),
        )
    ],
    counts=lambda: [get_human_readable_count(number) for number in (0, 123, 1234, 2_000_000, 3 * 10**9, 4 * 10**14, 5 * 10**15)],
    counts_negative=lambda: get_human_readable_count(-1),
    sizes=lambda: [get_formatted_model_size(number) for number in (0.0, 12.3456, 1e6)],
    shapes=lambda: [
        parse_batch_shape(batch) for batch in (torch.ones(2, 3), [torch.ones(1), torch.ones(2)], "?", {"a": 1}, [[1]])
    ],
    shared=lambda: [find_shared_parameters(tied()), find_shared_parameters(Net())],
    shared_of_number=lambda: find_shared_parameters(3),
    shared_set=lambda: (lambda m: m[1].weight is m[0].weight)(set_shared_parameters(tied(), [["0.weight", "1.weight"]])),
    compiled_back=lambda: from_compiled(nn.Linear(1, 1)),
    uncompiled=lambda: to_uncompiled(nn.Linear(1, 1)),
    uncompiled_net=lambda: type(to_uncompiled(torch.compile(Net()))),
    not_compiled_net=lambda: type(to_uncompiled(Net())),
    overridden=lambda: [
        is_overridden("training_step", Recurrent()),
        is_overridden("forward", Net()),
        is_overridden("no_such", Net()),
    ],
    overridden_of_parent=lambda: is_overridden("no_such", Net(), parent=pl.LightningModule),
    overridden_of_other=lambda: is_overridden("forward", nn.Linear(1, 1)),
    hook_signature=lambda: [
        is_param_in_hook_signature(lambda batch, extra: 0, "extra", explicit=True),
        is_param_in_hook_signature(lambda *args: 0, "extra"),
        is_param_in_hook_signature(lambda a, b: 0, "c", min_args=2),
    ],
    flops=lambda: measure_flops(lin := nn.Linear(4, 8), lambda: lin(torch.ones(2, 4)), lambda y: y.sum()),
    flops_forward=lambda: measure_flops(lin := nn.Linear(4, 8), lambda: lin(torch.ones(2, 4))),
    flops_of_cpu=lambda: get_available_flops(torch.device("cpu"), torch.float32),
    finite=lambda: check_finite_loss(torch.tensor(1.0)),
    not_finite=lambda: check_finite_loss(torch.tensor(float("nan"))),
    scheduler_config=lambda: LRSchedulerConfig(scheduler=None),
)


@ask
def norms() -> Any:
    net = nn.Linear(2, 1)
    net(torch.ones(1, 2)).sum().backward()
    return [
        grad_norm(net, 2),
        grad_norm(net, "inf"),
        grad_norm(net, 1, "."),
        grad_norm(nn.Linear(1, 1), 2),
        attempt(lambda: grad_norm(net, 0)),
    ]


@ask
def norm_of_text() -> Any:
    return [attempt(lambda: grad_norm(nn.Linear(1, 1), "two")), attempt(lambda: grad_norm(nn.Linear(1, 1), -1))]
