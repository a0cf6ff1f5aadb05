"""``LambdaCallback``: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_compat.callbacks.callback import Callback

_Hook = Callable[..., Any] | None


class LambdaCallback(Callback):
    """A callback made of functions: each argument is called in place of the hook of that name, with its arguments but ``self``.

    ::

        stop = LambdaCallback(on_fit_end=lambda trainer, module: print("stopped at", trainer.global_step))
        trainer = pl.Trainer(callbacks=[stop])

    API: https://lightning.ai/docs/pytorch/2.6.0/api/lightning.pytorch.callbacks.LambdaCallback.html
    """

    def __init__(
        self,
        setup: _Hook = None,
        teardown: _Hook = None,
        on_fit_start: _Hook = None,
        on_fit_end: _Hook = None,
        on_sanity_check_start: _Hook = None,
        on_sanity_check_end: _Hook = None,
        on_train_batch_start: _Hook = None,
        on_train_batch_end: _Hook = None,
        on_train_epoch_start: _Hook = None,
        on_train_epoch_end: _Hook = None,
        on_validation_epoch_start: _Hook = None,
        on_validation_epoch_end: _Hook = None,
        on_test_epoch_start: _Hook = None,
        on_test_epoch_end: _Hook = None,
        on_validation_batch_start: _Hook = None,
        on_validation_batch_end: _Hook = None,
        on_test_batch_start: _Hook = None,
        on_test_batch_end: _Hook = None,
        on_train_start: _Hook = None,
        on_train_end: _Hook = None,
        on_validation_start: _Hook = None,
        on_validation_end: _Hook = None,
        on_test_start: _Hook = None,
        on_test_end: _Hook = None,
        on_exception: _Hook = None,
        on_save_checkpoint: _Hook = None,
        on_load_checkpoint: _Hook = None,
        on_before_backward: _Hook = None,
        on_after_backward: _Hook = None,
        on_before_optimizer_step: _Hook = None,
        on_before_zero_grad: _Hook = None,
        on_predict_start: _Hook = None,
        on_predict_end: _Hook = None,
        on_predict_batch_start: _Hook = None,
        on_predict_batch_end: _Hook = None,
        on_predict_epoch_start: _Hook = None,
        on_predict_epoch_end: _Hook = None,
    ) -> None:
        hooks = {name: hook for name, hook in locals().items() if name != "self" and hook is not None}
        vars(self).update(hooks)
