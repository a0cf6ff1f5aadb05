"""Values for which a step's Python asks: of nothing, of constants, of the batch, of buffers and small parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import asked_assignments  # noqa: F401
import asked_of_the_step  # noqa: F401
import asked_texts  # noqa: F401
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from recording import RecordingLogger, Run, case, main, numbers
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor]


def sequences(count: int = 96) -> Data:
    """Padded sequences, their lengths, of which each batch has the same longest but for two, and targets."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, 4, generator=generator)
    lengths = torch.randint(1, 5, (count,), generator=generator)
    lengths[::4] = 5
    lengths[16:32] = 4
    lengths[64:80] = 6
    return x, lengths, torch.randn(count, generator=generator)


class Asking(pl.LightningModule):
    """A layer over each position; ``loss_of`` makes a loss of its outputs."""

    def __init__(self, loss_of: Callable[[Asking, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.gain = nn.Parameter(torch.ones(1))
        self.threshold = torch.tensor([0.5, 2.0])
        self.chosen: Tensor
        self.register_buffer("chosen", torch.tensor([True, False, True, True]))
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("count", torch.tensor(0))
        self.loss_of = loss_of

    def training_step(self, batch: Data, batch_idx: int) -> Tensor:
        x, lengths, y = batch
        loss = self.loss_of(self, self.layer(x).squeeze(-1), lengths, y)
        self.log("train", loss)
        return loss

    def validation_step(self, batch: Data, batch_idx: int) -> None:
        x, lengths, y = batch
        self.log("val", self.loss_of(self, self.layer(x).squeeze(-1), lengths, y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02)


def fit(run: Run, loss_of: Callable[[Asking, Tensor, Tensor, Tensor], Tensor], **options: Any) -> None:
    run.fit(Asking(loss_of), run.trainer(max_epochs=2, **options), run.loader(*sequences()))


@case
def branches_on_the_batch(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        mask = torch.arange(6)[None] < lengths[:, None]
        loss = F.mse_loss((h * mask).sum(1), y)
        if (lengths < 4).all():
            return loss
        if lengths.max() > 5 and lengths.sum() != 0:
            loss = loss * 0.5
        assert not torch.isnan(y).any(), "targets"
        return loss + 0.1 * h.mean() if lengths.sum().item() % 2 else loss

    run.fit(Asking(loss_of), run.trainer(max_epochs=2), run.loader(*sequences()), run.loader(*sequences(32)))


@case
def branches_on_the_batch_in_accumulation(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        return h.mean(1).sub(y).pow(2).mean() * (2.0 if lengths.max() == 6 else 1.0)

    fit(run, loss_of, accumulate_grad_batches=2)


@case
def sizes_of_the_batch(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        longest = int(lengths.max())
        h = h[:, :longest]
        mask = torch.zeros(len(h), lengths.max()).to(h)
        for row, length in enumerate(lengths[:2]):
            mask[row, :length] = 1
        mask[2:] = (torch.arange(longest) < lengths[2:, None]).float()
        one_hot = F.one_hot(lengths).float()
        return F.mse_loss((h * mask).sum(1), y) + one_hot.mean() * h.mean()

    fit(run, loss_of)


@case
def numbers_of_the_batch(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        mean = lengths.float().mean().item()
        self.log("mean length", mean)
        loss = F.mse_loss(h.mean(1), y) * mean / len(lengths)
        return loss * 2 if mean > 4.2 else loss

    fit(run, loss_of)


@case
def elements_of_the_batch(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        mask = torch.arange(6)[None] < lengths.clamp(4, 4)[:, None]
        mask[0] = False
        rows = (lengths > 0).nonzero().squeeze(1)
        _, places, counts = torch.unique(lengths >= 0, return_inverse=True, return_counts=True)
        weights = h.new_zeros(len(h), 6)
        weights[mask] = h[mask].detach().sigmoid()
        repeated = torch.repeat_interleave(y, torch.full_like(lengths, 2))
        loss = (h[mask] ** 2).mean() + h.masked_select(mask).mean() + F.mse_loss(h[rows].mean(1), y[rows])
        return loss + (weights * h).mean() + repeated.mean() * h.mean() + (counts * h.mean()).sum() / 100 + places.sum()

    fit(run, loss_of)


@case
def lists_and_arrays_of_the_batch(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        some = lengths.clamp(4, 5)
        some[:] = 5 if lengths.numpy().max() > 5 else 4
        parts = h[:, :4].reshape(-1).split([4 * n for n in torch.ones(16, dtype=torch.long).tolist()])
        sizes = sorted(set(some.tolist()))
        return torch.stack([part.mean() for part in parts]).pow(2).mean() * sizes[-1] + h[:, : sizes[0]].mean()

    fit(run, loss_of)


@case
def constants(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        square = h[:, :4].unsqueeze(1).expand(-1, 4, 4)
        loss = (square[:, torch.eye(4, dtype=torch.bool)] ** 2).mean()
        for k in torch.arange(1, 4).tolist():
            loss = loss + k * h[:, k].mean()
        loss = loss + torch.clamp(h, 0, self.threshold.data[0]).mean()
        return loss * 2 if self.threshold[1] > 1 else loss

    class Change(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                pl_module.threshold[1] = 0.5

    run.fit(Asking(loss_of), run.trainer(max_epochs=2, callbacks=[Change()]), run.loader(*sequences()))


@case
def buffers(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        if not self.is_set:
            self.centre.copy_(h.detach().mean())
            self.is_set.fill_(True)
        self.count += 1
        loss = F.mse_loss(h.mean(1), y) + (self.layer.weight[:, self.chosen] ** 2).sum() + (h.mean() - self.centre) ** 2
        return loss * 2 if self.count.item() > 4 else loss

    fit(run, loss_of)


@case
def small_parameters(run: Run) -> None:
    def loss_of(self: Asking, h: Tensor, lengths: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(h.mean(1) * self.gain, y) + self.gain.pow(2).sum()
        return loss * 3 if self.gain.item() > 0.9 else loss

    fit(run, loss_of)


@case
def optimized_by_hand(run: Run) -> None:
    class ByHand(Asking):
        def __init__(self) -> None:
            super().__init__(lambda self, h, lengths, y: F.mse_loss(h.mean(1), y))
            self.automatic_optimization = False

        def training_step(self, batch: Data, batch_idx: int) -> None:
            x, lengths, y = batch
            optimizer = self.optimizers()
            for _ in range(2 if lengths.max() > 5 else 1):
                loss = self.loss_of(self, self.layer(x).squeeze(-1), lengths, y)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.log("train", loss)

    run.fit(ByHand(), run.trainer(max_epochs=2), run.loader(*sequences()))


def loop(run: Run, compiled: bool) -> None:
    """Fabric's loop over the batches, as it is or compiled."""
    fabric = Fabric(
        accelerator=run.accelerator, devices=run.devices, num_nodes=run.nodes, strategy=run.strategy, loggers=RecordingLogger(run)
    )
    fabric.launch()
    model = nn.Linear(4, 1)
    run.initialise(model)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.02))

    def step(batch: Data) -> Tensor:
        x, lengths, y = batch
        h = model(x).squeeze(-1)
        loss = F.mse_loss(h[:, : int(lengths.max())].mean(1), y)
        if lengths.max() > 5:
            loss = loss * lengths.float().mean().item()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        return loss

    made: Any = fabric
    step = made.compile(step) if compiled and hasattr(fabric, "compile") else step
    for batch in fabric.setup_dataloaders(run.loader(*sequences())):
        run.record["losses"].append(numbers(fabric.all_reduce(step(batch).detach())))
    run.weights = {name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()}


@case
def in_a_loop(run: Run) -> None:
    loop(run, compiled=False)


@case
def in_a_compiled_loop(run: Run) -> None:
    loop(run, compiled=True)


if __name__ == "__main__":
    main()
