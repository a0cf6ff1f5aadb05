"""``WeightAveraging`` and ``EMAWeightAveraging``: running averages of the weights, for validation and as the result of
training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from torch_compat.callbacks.averaged_weights import AveragedWeights, AveragingRule, current_weights
from torch_compat.callbacks.callback import Callback
from torch_compat.utilities.rank_zero import rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from torch_compat.core.module import LightningModule
    from torch_compat.trainer.trainer import Trainer
    from torch_compat.utilities.types import STEP_OUTPUT


class WeightAveraging(Callback):
    """Averages the weights after training steps, with the semantics of ``torch.optim.swa_utils.AveragedModel``.

    Validation, in ``fit`` and in a later ``validate``, and the module after ``fit`` have the averages. They live where the
    parameters live, sharded like them, and are updated by a compiled program; so sharded models are averaged too. Averaging
    begins with the weights that the module has when ``fit`` starts to run.

    Override ``should_update`` to choose when averages are updated.

    ::

        averaging = WeightAveraging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.999))
        pl.Trainer(max_epochs=1, callbacks=[averaging]).fit(module, loader)

    Args:
        device: for Lightning's signature; averages stay where the parameters are, whatever it names.
        use_buffers: average the buffers too; if not, each update copies them.
        avg_fn: ``(averaged, current, num_averaged) -> averaged``, for each tensor; default: equally weighted. Called once,
            under capture; one that uses ``num_averaged`` as a Python number is called at every update.
        multi_avg_fn: ``(averaged, current, num_averaged)`` for lists of tensors of one dtype, in place.

    Raises:
        TypeError: another argument.
        AssertionError: ``avg_fn`` and ``multi_avg_fn`` together.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.WeightAveraging.html
    """

    def __init__(self, device: torch.device | str | int | None = None, use_buffers: bool = True, **kwargs: Any) -> None:
        if unknown := set(kwargs) - {"avg_fn", "multi_avg_fn"}:
            raise TypeError(
                f"{type(self).__name__} got unexpected keyword arguments {sorted(unknown)}: expected avg_fn or multi_avg_fn, as"
                " torch.optim.swa_utils.AveragedModel takes them."
            )
        if kwargs.get("avg_fn") is not None and kwargs.get("multi_avg_fn") is not None:
            raise AssertionError("Only one of avg_fn and multi_avg_fn should be provided")
        if device is not None:
            torch.device(device)  # a misspelt one is an error
            rank_zero_info(f"{type(self).__name__}(device={device!r}): averages stay on the mesh, sharded like the parameters.")
        self._use_buffers = use_buffers
        self._kwargs = kwargs
        self._weights: AveragedWeights | None = None
        self._restored: tuple[dict[str, torch.Tensor], int] | None = None
        self._module: LightningModule | None = None  # that the last `fit` trained
        self._latest_update_step = 0
        self._latest_update_epoch = -1

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether to update after this step or this epoch (one of them is given, counted from 0); by default after every step."""
        return step_idx is not None

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._weights = self._restored = None
            self._module = pl_module

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the restored averages, or with the weights as they are."""
        averaged = [name for name, _ in pl_module.named_parameters()]
        buffers = [name for name, _ in pl_module.named_buffers()]
        if self._use_buffers:
            averaged, buffers = averaged + buffers, []
        self._weights = AveragedWeights(averaged, AveragingRule(**self._kwargs), copied=buffers)
        values, self._weights.count = self._restored or ({}, 0)
        self._weights.start(current_weights(trainer), values)
        self._restored = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step
        if steps > self._latest_update_step and self.should_update(step_idx=steps - 1):
            self._update(trainer)
            self._latest_update_step = steps

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch
        if epoch > self._latest_update_epoch and self.should_update(epoch_idx=epoch):
            self._update(trainer)
            self._latest_update_epoch = epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._weights is not None:
            self._weights.hand_over(current_weights(trainer))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._weights is not None:
            self._weights.take_back(current_weights(trainer))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restored is not None:  # `validate` with a checkpoint, after a `fit`
            self._start(trainer, pl_module)
        if self._weights is not None:
            self._weights.swap(current_weights(trainer))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._weights is not None:
            self._weights.swap(current_weights(trainer))

    @property
    def _average_model(self) -> AveragedModel | None:
        """A copy of the module with the averages as they are now; None before the first ``fit``."""
        if self._weights is None or self._module is None:
            return None
        return self._weights.average_model(self._module, use_buffers=self._use_buffers, **self._kwargs)

    def _update(self, trainer: Trainer) -> None:
        assert self._weights is not None
        self._weights.update(current_weights(trainer))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"latest_update_step": self._latest_update_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._latest_update_step = state_dict["latest_update_step"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Puts the averages under ``state_dict``, the weights that are being trained under ``current_model_state``."""
        if self._weights is None:
            rank_zero_info(
                f"{type(self).__name__}: this checkpoint is saved outside of `fit`, so it holds weights and no averages."
            )
            return
        current = checkpoint["state_dict"]
        checkpoint["current_model_state"] = current
        checkpoint["state_dict"] = {**current, **self._averages(current, pl_module)}
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(self._weights.count)}

    def _averages(self, state: dict[str, Any], module: LightningModule) -> dict[str, torch.Tensor]:
        """The averages by the names of the ``state_dict``; a tied weight has several."""
        assert self._weights is not None
        first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        averages = self._weights.tensors()
        found = {name: first[id(tensor)] for name, tensor in every if name in state}
        return {name: averages[averaged] for name, averaged in found.items() if averaged in averages}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continues with both, the averages and the weights that were being trained."""
        if self._module is None:
            rank_zero_warn(
                "You're using the WeightAveraging callback, but loading a checkpoint outside of `fit`: there the weights are the"
                " averages, those under the checkpoint's `state_dict`, and nothing is averaged."
            )
            return
        count = 0
        averages = dict(checkpoint["state_dict"])
        if "current_model_state" in checkpoint:
            rank_zero_info("Found current_model_state in the checkpoint. This will be used to initialize the model.")
            count = int(checkpoint["averaging_state"]["n_averaged"])
            # The module has loaded `state_dict`, the averages, by now.
            pl_module.load_state_dict(checkpoint["current_model_state"])
        else:
            rank_zero_warn(
                "The checkpoint was not created with WeightAveraging. Weights and averages both begin with its `state_dict`."
            )
        self._restored = (averages, count)


class EMAWeightAveraging(WeightAveraging):
    """``WeightAveraging`` with an exponential moving average: ``decay * averaged + (1 - decay) * current``.

    ::

        trainer = pl.Trainer(callbacks=[EMAWeightAveraging(decay=0.99)])

    Args:
        device, use_buffers, kwargs: as in ``WeightAveraging``.
        decay: weight of the past, between 0 and 1.
        update_every_n_steps: update after steps 0, n, 2n, ...; 0 for not after steps.
        update_starting_at_step: first step to update after.
        update_starting_at_epoch: update at the end of this and later epochs too.

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.EMAWeightAveraging.html
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(device=device, use_buffers=use_buffers, avg_fn=get_ema_avg_fn(decay=decay), **kwargs)
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            begun = self.update_starting_at_step is None or step_idx >= self.update_starting_at_step
            if begun and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0:
                return True
        return epoch_idx is not None and self.update_starting_at_epoch is not None and epoch_idx >= self.update_starting_at_epoch
