"""``BaseFinetuning`` and ``BackboneFinetuning``: freeze parts of a module, and train them from some epoch on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module, ModuleDict
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import Optimizer

from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.exceptions import MisconfigurationException
from torch_compat.utilities.rank_zero import LOGGER_NAME, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer

log = logging.getLogger(f"{LOGGER_NAME}.callbacks.finetuning")

Modules = Module | Iterable[Any]
"""A module, or an iterable of modules and iterables."""


def multiplicative(epoch: int) -> float:
    """Doubles the learning rate every epoch."""
    return 2.0


class BaseFinetuning(Callback):
    """Freezes modules before training, and adds them to the optimizer later.

    Override ``freeze_before_training``, which calls ``freeze``, and ``finetune_function``, which calls
    ``unfreeze_and_add_param_group`` at the epoch of your choice. Make the optimizer of those parameters that require gradients
    (``filter(lambda p: p.requires_grad, self.parameters())``).

    Param groups that were added are in the checkpoint and are added again when a run is resumed. Each change of what is trained
    compiles the training step anew, once.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.BaseFinetuning.html
    """

    def __init__(self) -> None:
        # Index of the optimizer → its param groups, with names in place of parameters.
        self._internal_optimizer_metadata: dict[int, list[dict[str, Any]]] = {}
        self._restarting = False

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        """Freezes modules; called before ``configure_optimizers``."""
        raise NotImplementedError(f"{type(self).__name__} must implement `freeze_before_training`")

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreezes modules; called at the start of every epoch, for every optimizer."""
        raise NotImplementedError(f"{type(self).__name__} must implement `finetune_function`")

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.freeze_before_training(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._restarting:
            return
        self._restarting = False
        params = dict(pl_module.named_parameters())
        for index, groups in self._internal_optimizer_metadata.items():
            if index < len(trainer.optimizers):
                trainer.optimizers[index].param_groups = _renamed(groups, params)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for index, optimizer in enumerate(trainer.optimizers):
            before = len(optimizer.param_groups)
            self.finetune_function(pl_module, trainer.current_epoch, optimizer)
            self._store(pl_module, index, before, optimizer.param_groups)

    def _store(self, module: LightningModule, index: int, before: int, groups: list[dict[str, Any]]) -> None:
        names = {param: name for name, param in module.named_parameters()}
        if index not in self._internal_optimizer_metadata:
            self._internal_optimizer_metadata[index] = _renamed(groups, names)
        elif before != len(groups):
            self._internal_optimizer_metadata[index].extend(_renamed(groups[before:], names))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"internal_optimizer_metadata": self._internal_optimizer_metadata}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restarting = True
        # Lightning before 1.4 saved the groups alone.
        self._internal_optimizer_metadata = state_dict.get("internal_optimizer_metadata", state_dict)

    # -- for subclasses ------------------------------------------------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[Module]:
        """The modules without children, and those that have parameters of their own beside their children."""
        if isinstance(modules, ModuleDict):
            modules = modules.values()
        if not isinstance(modules, Module):
            return [found for part in modules for found in BaseFinetuning.flatten_modules(part)]
        return [part for part in modules.modules() if not list(part.children()) or part._parameters]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Generator[Any, None, None]:
        """Their parameters whose ``requires_grad`` is as given; with ``train_bn=False`` without those of batch norm layers."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and not train_bn:
                continue
            for param in module.parameters(recurse=False):
                if param.requires_grad == requires_grad:
                    yield param

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Let the parameters require gradients, and batch norm layers track statistics."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm):
                module.track_running_stats = True
            for param in module.parameters(recurse=False):
                param.requires_grad = True

    @staticmethod
    def freeze_module(module: Module) -> None:
        """Freezes one module's own parameters; a batch norm layer stops tracking statistics."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for param in module.parameters(recurse=False):
            param.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freezes modules; with ``train_bn`` their batch norm layers are trained all the same."""
        for module in BaseFinetuning.flatten_modules(modules):
            if isinstance(module, _BatchNorm) and train_bn:
                BaseFinetuning.make_trainable(module)
            else:
                BaseFinetuning.freeze_module(module)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
        """The parameters that the optimizer does not have yet.

        As in Lightning, one that is *equal* to a parameter of the optimizer, value by value, counts as known.
        """
        known = [param for group in optimizer.param_groups for param in group["params"]]
        new: list[Any] = []
        skipped = False
        for param in params:
            if any(_equal(param, other) for other in known):
                skipped = True
            else:
                new.append(param)
        if skipped:
            rank_zero_warn(
                "The provided params to be frozen already exist within another group of this optimizer. They stay where they are,"
                " with that group's options. An optimizer that is to get them later must be made without them, from parameters"
                " that require a gradient: `[p for p in self.parameters() if p.requires_grad]`."
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Let modules be trained by ``optimizer``, in a param group of their own.

        Args:
            modules: what to unfreeze.
            optimizer: gets the new param group.
            lr: its learning rate; default: that of the first group, divided by ``initial_denom_lr``.
            initial_denom_lr: see ``lr``; used without ``lr`` only.
            train_bn: False leaves the parameters of batch norm layers out.
        """
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] if lr is None else float(lr)
        params = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        new = BaseFinetuning.filter_on_optimizer(optimizer, params)
        if new:
            optimizer.add_param_group({"params": new, "lr": rate / (initial_denom_lr if lr is None else 1.0)})


class BackboneFinetuning(BaseFinetuning):
    """Trains ``pl_module.backbone`` from an epoch on, with a learning rate that grows towards that of the rest.

    Args:
        unfreeze_backbone_at_epoch: from this epoch on, counted from 0.
        lambda_func: epoch → factor by which the backbone's learning rate grows.
        backbone_initial_ratio_lr: first learning rate of the backbone, as a part of the present one of the rest.
        backbone_initial_lr: the same as a number; used instead if given.
        should_align: once the backbone's learning rate is above that of the rest, it follows it.
        initial_denom_lr: as in ``unfreeze_and_add_param_group``.
        train_bn: train the backbone's batch norm layers.
        verbose: log the learning rates.
        rounding: digits in that log.

    Raises:
        MisconfigurationException: the module has no ``backbone`` that is a module (when ``fit`` starts).

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.BackboneFinetuning.html
    """

    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: float = 10e-2,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self.previous_backbone_lr: float | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "previous_backbone_lr": self.previous_backbone_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.previous_backbone_lr = state_dict["previous_backbone_lr"]
        super().load_state_dict(state_dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(getattr(pl_module, "backbone", None), Module):
            raise MisconfigurationException(
                "The LightningModule should have a nn.Module `backbone` attribute: assign the part to freeze to it"
            )
        super().on_fit_start(trainer, pl_module)

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.backbone)  # pyright: ignore[reportArgumentType]

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        rate = optimizer.param_groups[0]["lr"]
        if epoch == self.unfreeze_backbone_at_epoch:
            backbone_rate = self.backbone_initial_lr
            if backbone_rate is None:
                backbone_rate = rate * self.backbone_initial_ratio_lr
            self.unfreeze_and_add_param_group(
                pl_module.backbone,  # pyright: ignore[reportArgumentType]
                optimizer,
                backbone_rate,
                train_bn=self.train_bn,
                initial_denom_lr=self.initial_denom_lr,
            )
        else:
            assert self.previous_backbone_lr is not None
            backbone_rate = self.lambda_func(epoch + 1) * self.previous_backbone_lr
            if self.should_align and backbone_rate > rate:
                backbone_rate = rate
            optimizer.param_groups[-1]["lr"] = backbone_rate
        self.previous_backbone_lr = backbone_rate
        if self.verbose:
            digits = self.rounding
            log.info(f"Current lr: {round(rate, digits)}, Backbone lr: {round(backbone_rate, digits)}")


def _renamed(groups: list[dict[str, Any]], names: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Param groups with each parameter replaced by its name, or each name by its parameter."""
    return [{**group, "params": [names[entry] for entry in group["params"]]} for group in groups]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
