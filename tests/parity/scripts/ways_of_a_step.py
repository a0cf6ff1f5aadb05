"""The same effects of a step's Python on every way that runs it: one program, two parts, accumulated, by hand, in evaluation."""

from __future__ import annotations

from typing import Any

from recording import Run, case, main
from semantics_models import Deep, fit
from torch import Tensor


@case
def flags_set_in_steps(run: Run) -> None:
    class Thawing(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.block[0].requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.current_epoch == 1 and batch_idx == 0:
                self.block[0].requires_grad_(True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.block[1].requires_grad_(False)

    class InTwoParts(Thawing):
        def on_after_backward(self) -> None:
            run.note(f"gradients {self.global_step}", [name for name, p in self.named_parameters() if p.grad is not None])

    class ByHand(Thawing):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

    for kind, options in ((Thawing, {}), (InTwoParts, {}), (Thawing, {"accumulate_grad_batches": 2}), (ByHand, {})):
        model = kind()
        fit(run, model, n=48, val=True, **options)
        run.note(f"{kind.__name__} {options}", {name: [p, p.requires_grad] for name, p in model.named_parameters()})


if __name__ == "__main__":
    main()
