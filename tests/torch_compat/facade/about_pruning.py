"""``ModelPruning``: what it refuses, and the weights, names and messages of runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from answering import ask_each
from lightning.pytorch import callbacks as cb
from models import Net, data, trainer
from torch import nn
from torch.nn.utils import prune


class Deep(Net):
    """Two layers, of which the first has most parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Kept(prune.BasePruningMethod):
    """A method of the user's, of a kind that does not go over all parameters together."""

    PRUNING_TYPE = "structured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask


class EachSecond(Kept):
    """A method of the user's: each second value goes."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
        return default_mask * (torch.arange(t.numel()) % 2).view_as(t)


def both_weights(net: Deep) -> list[tuple[nn.Module, str]]:
    return [(net.layer[0], "weight"), (net.layer[2], "weight")]


def run(method: Any, *, of: Callable[[Deep], Any] = both_weights, **options: Any) -> Callable[[], Any]:
    """A fit of three epochs: the weights that are left, the names of the state, and those in a checkpoint of the run."""

    def ask() -> Any:
        torch.manual_seed(1)
        net, lines = Deep(), _Lines()
        callback = cb.ModelPruning(method, of(net), **options)
        saved = cb.ModelCheckpoint("saved", save_top_k=-1, filename="{epoch}")
        one = trainer(max_epochs=3, callbacks=[callback, saved], enable_checkpointing=True)
        with lines:
            one.fit(net, data(12), data(4))
        state = torch.load("saved/epoch=1.ckpt", weights_only=True)["state_dict"]
        return [sorted(net.state_dict()), list(net.parameters()), dict(sorted(state.items())), lines.found]

    return ask


class _Lines(logging.Handler):
    """What the callback logs, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._logger = logging.getLogger("lightning.pytorch.callbacks.pruning")

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)


ALL_LEFT: dict[str, Any] = {"use_lottery_ticket_hypothesis": False}
"""Training goes on with what is left: on a CPU stock's own originals are trained after the first pruning."""

ask_each(
    said_pruning_function=lambda: cb.ModelPruning("l3_unstructured"),
    said_pruning_method=lambda: cb.ModelPruning(EachSecond()),
    said_pruning_by_module=lambda: cb.ModelPruning(Kept, use_global_unstructured=False),
    said_pruning_type=lambda: cb.ModelPruning(Kept),
    said_pruning_type_of_function=lambda: cb.ModelPruning("random_structured", pruning_dim=0),
    said_pruning_names=lambda: cb.ModelPruning("l1_unstructured", parameter_names=["gain"]),
    said_pruning_dim=lambda: cb.ModelPruning("ln_structured"),
    said_pruning_norm=lambda: cb.ModelPruning("ln_structured", pruning_dim=0, use_global_unstructured=False),
    said_pruning_amount=lambda: cb.ModelPruning("l1_unstructured", amount="half"),
    said_pruning_verbose=lambda: cb.ModelPruning("l1_unstructured", verbose=3),
    said_pruning_pairs=run("l1_unstructured", of=lambda net: "weight"),
    said_pruning_missing=run("l1_unstructured", of=lambda net: [(net.layer[1], "weight"), (nn.Linear(1, 1), "weight")]),
    pruned=run("l1_unstructured", amount=0.3, **ALL_LEFT),
    pruned_told=run("l1_unstructured", amount=0.3, verbose=2, **ALL_LEFT),
    pruned_everywhere=run("l1_unstructured", of=lambda net: None, amount=0.2, **ALL_LEFT),
    pruned_biases=run("l1_unstructured", of=lambda net: None, parameter_names=["bias"], **ALL_LEFT),
    pruned_by_module=run("random_unstructured", use_global_unstructured=False, verbose=1, **ALL_LEFT),
    pruned_in_rows=run("ln_structured", use_global_unstructured=False, pruning_dim=0, pruning_norm=1, **ALL_LEFT),
    pruned_by_number=run("l1_unstructured", amount=3, **ALL_LEFT),
    pruned_by_function=run("l1_unstructured", amount=lambda epoch: 0.1 * epoch, **ALL_LEFT),
    pruned_in_some_epochs=run("l1_unstructured", apply_pruning=lambda epoch: epoch != 1, **ALL_LEFT),
    pruned_after_validation=run("l1_unstructured", prune_on_train_epoch_end=False, **ALL_LEFT),
    pruned_with_masks_left=run("l1_unstructured", make_pruning_permanent=False, **ALL_LEFT),
    pruned_by_own_method=run(EachSecond, **ALL_LEFT),
    pruned_with_a_lottery_ticket=run("l1_unstructured", use_lottery_ticket_hypothesis=lambda epoch: epoch == 1),
    pruned_with_new_values=run(
        "l1_unstructured", resample_parameters=True, use_lottery_ticket_hypothesis=lambda epoch: epoch == 2
    ),
)
