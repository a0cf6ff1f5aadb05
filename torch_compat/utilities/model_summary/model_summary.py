"""A table of a LightningModule's layers with parameters, FLOPs and sizes."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import FlopCounterMode

from torch_compat.utilities.model_helpers import _ModuleMode
from torch_compat.utilities.model_summary.layer_summary import LayerSummary, parameter_count, parse_batch_shape
from torch_compat.utilities.model_summary.table import format_summary_table, get_formatted_model_size, get_human_readable_count
from torch_compat.utilities.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule

__all__ = [
    "LayerSummary",
    "ModelSummary",
    "get_formatted_model_size",
    "get_human_readable_count",
    "parse_batch_shape",
    "summarize",
]

_LEFTOVER_NAME = "other params"
_NOT_APPLICABLE = "n/a"


class ModelSummary:
    """The layers of a module, down to a depth.

    ``str()`` of it is the table. With ``example_input_array`` set, one forward (in eval mode, without gradients) gives input and
    output sizes and floating-point operations.

    Args:
        model: the module.
        max_depth: 1 for its children, 2 for theirs too, …; -1 for all, 0 for none.

    Raises:
        ValueError: another depth.
    """

    def __init__(self, model: LightningModule, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"`max_depth` can be -1, 0 or > 0, got {max_depth}.")
        self._model = model
        self._max_depth = max_depth
        self._flops: dict[str, dict[Any, int]] = {}
        self._total_flops = 0
        self._layer_summary = self.summarize()

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Names and modules of the table's lines."""
        if self._max_depth == 0:
            return []
        if self._max_depth == 1:
            return list(self._model.named_children())
        return [
            (name, module)
            for name, module in self._model.named_modules()
            if name and (self._max_depth == -1 or name.count(".") < self._max_depth)
        ]

    def summarize(self) -> dict[str, LayerSummary]:
        """Looks at the module again: the lines by name."""
        layers = OrderedDict((name, LayerSummary(module)) for name, module in self.named_modules)
        try:
            if self._model.example_input_array is not None:
                self._forward_example_input()
        finally:
            for layer in layers.values():
                layer.detach_hook()
        if any(isinstance(parameter, UninitializedParameter) for parameter in self._model.parameters()):
            rank_zero_warn(
                "The total number of parameters detected may be inaccurate: of an"
                " `UninitializedParameter` the first input decides the size: `self.example_input_array` gives it one."
            )
        return layers

    def _forward_example_input(self) -> None:
        model = self._model
        example = model._apply_batch_transfer_handler(model._on_before_batch_transfer(model.example_input_array))
        trainer = model._trainer
        precision = getattr(trainer, "precision_plugin", None)
        modes = _ModuleMode()
        modes.capture(model)
        model.eval()
        counter = FlopCounterMode(display=False)
        try:
            with torch.no_grad(), precision.forward_context() if precision is not None else nullcontext(), counter:
                _call(model, example)
        finally:
            modes.restore(model)
        prefix = f"{type(model).__name__}."
        self._flops = {name.removeprefix(prefix): dict(counts) for name, counts in counter.get_flop_counts().items()}
        self._total_flops = counter.get_total_flops()

    # ---- columns

    @property
    def layer_names(self) -> list[str]:
        """Names, dotted below the first level."""
        return list(self._layer_summary)

    @property
    def layer_types(self) -> list[str]:
        """Class names."""
        return [layer.layer_type for layer in self._layer_summary.values()]

    @property
    def in_sizes(self) -> list[Any]:
        """Input shapes; ``"?"`` where unknown."""
        return [layer.in_size for layer in self._layer_summary.values()]

    @property
    def out_sizes(self) -> list[Any]:
        """Output shapes; ``"?"`` where unknown."""
        return [layer.out_size for layer in self._layer_summary.values()]

    @property
    def param_nums(self) -> list[int]:
        """Numbers of parameters, children's included."""
        return [layer.num_parameters for layer in self._layer_summary.values()]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each is in train mode."""
        return [layer.training for layer in self._layer_summary.values()]

    @property
    def flop_counts(self) -> dict[str, dict[Any, int]]:
        """Floating-point operations by op, for each line; empty without an example input."""
        return {name: self._flops.get(name, {}) for name in self._layer_summary}

    # ---- totals

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Numbers of submodules, the module itself not counted, in ``"train"`` and ``"eval"`` mode."""
        modes = [module.training for name, module in self._model.named_modules() if name]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def total_parameters(self) -> int:
        """Numbers in all parameters, shared ones once."""
        return sum(parameter_count(parameter) for parameter in self._model.parameters())

    @property
    def trainable_parameters(self) -> int:
        """The number of parameters that require gradients, see :attr:`total_parameters`."""
        return sum(parameter_count(parameter) for parameter in self._model.parameters() if parameter.requires_grad)

    @property
    def total_layer_params(self) -> int:
        """Numbers in the parameters of the table's layers, each parameter once."""
        parameters = {p for _, module in self.named_modules for p in module.parameters()}
        return sum(parameter_count(parameter) for parameter in parameters)

    @property
    def model_size(self) -> float:
        """Size of all parameters in MB (10**6 bytes), in their own dtypes."""
        return sum(parameter_count(p) * p.element_size() for p in self._model.parameters() if not _is_lazy(p)) * 1e-6

    @property
    def total_flops(self) -> int:
        """Floating-point operations of one forward of the example input; 0 without one."""
        return self._total_flops

    # ---- the table

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """Headers and cells of the columns, with a line for parameters that are in none of the layers."""
        flops = [sum(self._flops.get(name, {}).values()) for name in self._layer_summary]
        columns: list[tuple[str, list[str]]] = [
            (" ", [str(index) for index in range(len(self._layer_summary))]),
            ("Name", self.layer_names),
            ("Type", self.layer_types),
            ("Params", [get_human_readable_count(count) for count in self.param_nums]),
            ("Mode", ["train" if training else "eval" for training in self.training_modes]),
            ("FLOPs", [get_human_readable_count(count) for count in flops]),
        ]
        if self._model.example_input_array is not None:
            columns += [
                ("In sizes", [str(size) for size in self.in_sizes]),
                ("Out sizes", [str(size) for size in self.out_sizes]),
            ]
        leftover = self.total_parameters - self.total_layer_params
        if leftover > 0:
            cells = {" ": " ", "Name": _LEFTOVER_NAME, "Params": get_human_readable_count(leftover)}
            for header, column in columns:
                column.append(cells.get(header, _NOT_APPLICABLE))
        return columns

    def __str__(self) -> str:
        return format_summary_table(
            self.total_parameters,
            self.trainable_parameters,
            self.model_size,
            self.total_training_modes,
            self.total_flops,
            *self._get_summary_data(),
        )

    __repr__ = __str__


def summarize(lightning_module: LightningModule, max_depth: int = 1) -> ModelSummary:
    """:class:`ModelSummary` of a module."""
    return ModelSummary(lightning_module, max_depth=max_depth)


def _call(model: nn.Module, example: Any) -> None:
    if isinstance(example, dict):
        model(**example)
    elif isinstance(example, tuple):
        model(*example)
    else:
        model(example)


def _is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, UninitializedParameter)
