"""``ModelPruning``: masks of ``torch.nn.utils.prune`` over parameters, renewed by epoch."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import prune

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_zero_only

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule

log = logging.getLogger(f"{LOGGER_NAME}.callbacks.pruning")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(prune, name) for name in ("ln_structured", "l1_unstructured", "random_structured", "random_unstructured")
}
_METHODS: dict[str, type[prune.BasePruningMethod]] = {
    "ln_structured": prune.LnStructured,
    "l1_unstructured": prune.L1Unstructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

Pruned = Sequence[tuple[nn.Module, str]]
"""Modules, each with the name of one of its parameters."""


@dataclass
class _Original:
    """A module as it was before training, and which of the pruned parameters are its: ``(index, name)``."""

    module: nn.Module
    names: list[tuple[int, str]] = field(default_factory=list)


class ModelPruning(Callback):
    """Prunes parameters with PyTorch's methods after each epoch, and leaves the pruned weights themselves at the end.

    A pruned ``weight`` is ``weight_orig * weight_mask`` in each forward; the optimizer goes on with the parameters that it has.
    The first pruning compiles the step once more; from then on the mask's values alone change.

    Args:
        pruning_fn: ``"l1_unstructured"``, ``"ln_structured"``, ``"random_structured"``, ``"random_unstructured"``, or a subclass
            of :class:`torch.nn.utils.prune.BasePruningMethod`.
        parameters_to_prune: ``(module, name)`` of each parameter; default: all of ``parameter_names``.
        parameter_names: of ``"weight"`` and ``"bias"``, those that are pruned where no parameters are named; default: both.
        use_global_unstructured: the smallest values of all parameters together are pruned, not those of each.
        amount: how many values each pruning takes of those that are left: a fraction (float), a number (int), or what a function
            of the epoch says.
        apply_pruning: whether to prune, or a function of the epoch that says so.
        make_pruning_permanent: checkpoints, and the module after training, have the pruned weights, no originals and masks.
        use_lottery_ticket_hypothesis: whether what is left returns to its values before training after each pruning, or a
            function of the epoch that says so (`Frankle and Carbin <https://arxiv.org/abs/1803.03635>`_).
        resample_parameters: it gets new random values then, from the module's ``reset_parameters``.
        pruning_dim: of a structured method.
        pruning_norm: ``n`` of ``"ln_structured"``.
        verbose: 1 logs how much is pruned, 2 also of each parameter.
        prune_on_train_epoch_end: prune there; else at the end of a validation.

    Raises:
        MisconfigurationException: an argument that is none of these, or (at the start) a parameter that the module does not have.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.ModelPruning.html
    """

    PARAMETER_NAMES = ("weight", "bias")

    def __init__(
        self,
        pruning_fn: Callable[..., Any] | str,
        parameters_to_prune: Pruned = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        self._parameters_to_prune = parameters_to_prune
        self._parameter_names = parameter_names or self.PARAMETER_NAMES
        for name in self._parameter_names:
            if name not in self.PARAMETER_NAMES:
                raise MisconfigurationException(f"The provided `parameter_names` name: {name} isn't in {self.PARAMETER_NAMES}")
        self._use_global_unstructured = use_global_unstructured
        self._global_kwargs: dict[str, Any] = {}
        self._pruning_method_name: str | None = None
        self.pruning_fn: Any = self._method(pruning_fn, pruning_dim, pruning_norm)
        if use_global_unstructured and self.pruning_fn.PRUNING_TYPE != "unstructured":
            raise MisconfigurationException(
                'Only the "unstructured" PRUNING_TYPE is supported with `use_global_unstructured=True`. Found method '
                f"{self.pruning_fn} of type {self.pruning_fn.PRUNING_TYPE}"
            )
        if not (isinstance(amount, int | float) or callable(amount)):
            raise MisconfigurationException(
                f"`amount` should be provided and be either an int, a float or Callable function, got {amount!r}"
            )
        if verbose not in (0, 1, 2):
            raise MisconfigurationException(f"`verbose` must be any of (0, 1, 2), got {verbose!r}")
        self.amount = amount
        self._apply_pruning = apply_pruning
        self._make_pruning_permanent = make_pruning_permanent
        self._use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self._resample_parameters = resample_parameters
        self._verbose = verbose
        self._prune_on_train_epoch_end = prune_on_train_epoch_end
        self._originals: dict[int, _Original] = {}

    def _method(self, given: Any, dim: int | None, norm: int | None) -> Any:
        if not isinstance(given, str):
            if not (inspect.isclass(given) and issubclass(given, prune.BasePruningMethod)):
                raise MisconfigurationException(
                    f"`pruning_fn` is expected to be a str in {list(_FUNCTIONS)} or a PyTorch `BasePruningMethod`. Found: "
                    f"{given}. Pass the class, not an instance"
                )
            if not self._use_global_unstructured:
                raise MisconfigurationException(
                    "PyTorch `BasePruningMethod` is currently only supported with `use_global_unstructured=True`."
                )
            return given
        name = given.lower()
        if name not in _FUNCTIONS:
            raise MisconfigurationException(
                f"The provided `pruning_fn` {name} isn't available in PyTorch's built-in functions: {list(_FUNCTIONS)}"
            )
        options: dict[str, Any] = {}
        if name.endswith("_structured"):
            if dim is None:
                raise MisconfigurationException("When requesting `structured` pruning, the `pruning_dim` should be provided.")
            options["dim"] = dim
        if name == "ln_structured":
            if norm is None:
                raise MisconfigurationException("When requesting `ln_structured` pruning, the `pruning_norm` should be provided.")
            options["n"] = norm
        if self._use_global_unstructured:
            self._global_kwargs = options
            self._pruning_method_name = _METHODS[name].__name__
            return _METHODS[name]
        self._pruning_method_name = name
        return functools.partial(_FUNCTIONS[name], **options)

    # -- for subclasses ------------------------------------------------------------------------------------------------

    def filter_parameters_to_prune(self, parameters_to_prune: Pruned = ()) -> Pruned:
        """The parameters that are pruned, of those that may be; override it to choose."""
        return parameters_to_prune

    def make_pruning_permanent(self, module: nn.Module) -> None:
        """Put the pruned values in the place of originals and masks, for all parts of the module."""
        for part in module.modules():
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, prune.BasePruningMethod):
                    hook.remove(part)
                    del part._forward_pre_hooks[key]

    def apply_pruning(self, amount: int | float) -> None:
        """Prune the parameters once more."""
        before = self._zeros() if self._verbose else []
        if self._use_global_unstructured:
            prune.global_unstructured(
                self._parameters_to_prune, pruning_method=self.pruning_fn, **self._resolve_global_kwargs(amount)
            )
        else:
            for module, name in self._parameters_to_prune:
                self.pruning_fn(module, name=name, amount=amount)
        if self._verbose:
            self._log_sparsity_stats(before, self._zeros(), amount)

    def apply_lottery_ticket_hypothesis(self) -> None:
        """Give the parameters the values from before training, or new ones of ``reset_parameters``; the masks stay.

        In stock on a CPU, training goes on in the kept values themselves, which are no originals from then on. Here they stay
        what they were, as in stock on other accelerators.
        """
        for original in self._originals.values():
            source = original.module
            if self._resample_parameters and callable(getattr(source, "reset_parameters", None)):
                source = copy.deepcopy(source)
                source.reset_parameters()  # pyright: ignore[reportCallIssue]
            for index, name in original.names:
                _copy(source, self._parameters_to_prune[index][0], name)

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        found = self.sanitize_parameters_to_prune(pl_module, self._parameters_to_prune, self._parameter_names)
        self._parameters_to_prune = self.filter_parameters_to_prune(found)
        self._originals = {}
        if self._use_lottery_ticket_hypothesis:
            for index, (module, name) in enumerate(self._parameters_to_prune):
                if id(module) not in self._originals:
                    self._originals[id(module)] = _Original(copy.deepcopy(module))
                self._originals[id(module)].names.append((index, name))

    def on_train_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._prune_on_train_epoch_end:
            self._run_pruning(pl_module.current_epoch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and not self._prune_on_train_epoch_end:
            self._run_pruning(pl_module.current_epoch)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._make_pruning_permanent:
            self.make_pruning_permanent(pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._make_pruning_permanent:  # in the file alone: training goes on with the masks
            checkpoint["state_dict"] = self._make_pruning_permanent_on_state_dict(pl_module)

    def _run_pruning(self, current_epoch: int) -> None:
        amount = _at(self.amount, current_epoch) if _at(self._apply_pruning, current_epoch) else 0
        if not amount:
            return
        self.apply_pruning(amount)
        if _at(self._use_lottery_ticket_hypothesis, current_epoch):
            self.apply_lottery_ticket_hypothesis()

    @staticmethod
    def _make_pruning_permanent_on_state_dict(pl_module: LightningModule) -> dict[str, Any]:
        state = pl_module.state_dict()
        for name in [key.removesuffix("_mask") for key in state if key.endswith("_mask") and f"{key[:-5]}_orig" in state]:
            original, mask = state.pop(f"{name}_orig"), state.pop(f"{name}_mask")
            state[name] = mask.to(original.dtype) * original
        return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}

    # -- parts of it ---------------------------------------------------------------------------------------------------

    @staticmethod
    def sanitize_parameters_to_prune(
        pl_module: LightningModule, parameters_to_prune: Pruned = (), parameter_names: Sequence[str] = ()
    ) -> Pruned:
        """The parameters that may be pruned: those given, or all of these names of the module's parts.

        Raises:
            MisconfigurationException: they are none of the module's, or no pairs of a module and a name.
        """
        own = [part for part in pl_module.modules() if not isinstance(part, _CONTAINERS)]
        parts = [part for part in own if not hasattr(part, "training_step")]  # LightningModules, which hold others
        if not parameters_to_prune:
            names = parameter_names or ModelPruning.PARAMETER_NAMES
            return [(part, name) for name in names for part in parts if isinstance(getattr(part, name, None), nn.Parameter)]
        if not (isinstance(parameters_to_prune, list | tuple) and all(map(_is_pair, parameters_to_prune))):
            raise MisconfigurationException(
                "The provided `parameters_to_prune` should either be list of tuple with 2 elements: (nn.Module, "
                f"parameter_name_to_prune) or None, got {parameters_to_prune!r}"
            )
        modules = [module for module, _ in parameters_to_prune if module not in parts]
        names = [name for module, name in parameters_to_prune if module in parts and not hasattr(module, name)]
        if modules or names:
            raise MisconfigurationException(
                "Some provided `parameters_to_prune` don't exist in the model. Found missing modules: "
                f"{modules} and missing parameters: {names}"
            )
        return parameters_to_prune

    def _resolve_global_kwargs(self, amount: int | float) -> dict[str, Any]:
        """The arguments that the pruning method takes."""
        self._global_kwargs["amount"] = amount
        known = inspect.signature(self.pruning_fn).parameters
        return {name: value for name, value in self._global_kwargs.items() if name in known}

    def _zeros(self) -> list[tuple[int, int]]:
        """The number of pruned values of each parameter, and the number of all."""
        masks = [getattr(module, f"{name}_mask", None) for module, name in self._parameters_to_prune]
        return [(0, 1) if mask is None else (int((mask == 0).sum()), mask.numel()) for mask in masks]

    @rank_zero_only
    def _log_sparsity_stats(self, prev: list[tuple[int, int]], curr: list[tuple[int, int]], amount: int | float = 0) -> None:
        total = sum(values for _, values in curr)
        then, now = sum(zeros for zeros, _ in prev), sum(zeros for zeros, _ in curr)
        applied = f"Applied `{self._pruning_method_name}`"
        log.info(f"{applied}. Pruned: {then}/{total} ({then / total:.2%}) -> {now}/{total} ({now / total:.2%})")
        if self._verbose < 2:
            return
        for (module, name), (then, of_then), (now, of_now) in zip(self._parameters_to_prune, prev, curr, strict=True):
            log.info(
                f"{applied} to `{module!r}.{name}` with amount={amount}. Pruned: {then} ({then / of_then:.2%}) -> {now} "
                f"({now / of_now:.2%})"
            )


def _at(given: Any, epoch: int) -> Any:
    """A value, or what a function of the epoch says."""
    return given(epoch) if callable(given) else given


def _is_pair(given: Any) -> bool:
    return len(given) == 2 and isinstance(given[0], nn.Module) and isinstance(given[1], str)


def _copy(source: nn.Module, into: nn.Module, name: str) -> None:
    """The value of a parameter into the one that a pruned module computes it from."""
    value, target = getattr(source, name), getattr(into, f"{name}_orig", None)
    target = getattr(into, name) if target is None else target
    if isinstance(value, torch.Tensor) and isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(value)
