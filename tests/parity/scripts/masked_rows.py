"""Rows that masks of the batch select, and packed sequences: other numbers of them in every batch, one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from recording import Run, case, main
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
Loss = Callable[["Selecting", Tensor, Tensor, Tensor, Tensor], Tensor]


def rows() -> Batch:
    """Features, sequences, classes and a mask, of which no two batches select as many."""
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(160, generator=generator) < torch.linspace(0.1, 0.95, 160)
    mask[::16] = True
    x = torch.randn(160, 6, generator=generator)
    lengths = torch.randint(1, 6, (160,), generator=generator)
    lengths[::8] = 5
    return x, torch.randint(0, 4, (160,), generator=generator), mask, lengths


class Selecting(pl.LightningModule):
    """A small net; ``loss_of`` makes a loss of features, its outputs, classes and mask."""

    def __init__(self, losses: list[Loss]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.expert = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.losses = losses
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y, mask, _ = batch
        out = self.net(x)
        total = out.new_zeros(())
        for number, loss_of in enumerate(self.losses):
            loss = loss_of(self, x, out, y, mask)
            self.log(f"loss {number}", loss)
            total = total + loss
        self.seen.append(out.detach()[mask])
        return total

    def on_train_epoch_end(self) -> None:
        self.log("seen", torch.cat(self.seen).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.02)


def fit(run: Run, *losses: Loss) -> None:
    run.fit(Selecting(list(losses)), run.trainer(max_epochs=1), run.loader(*rows()))


@case
def losses_over_selected_rows(run: Run) -> None:
    def regression(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.mse_loss(out[mask], x[mask][:, :4]) + F.smooth_l1_loss(out[mask][:, :2], x[mask, :2])

    def classes(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        kept = y != 2
        return (
            F.cross_entropy(out[mask], y[mask], label_smoothing=0.1) + F.cross_entropy(out[y != 2], y[kept], reduction="sum") / 16
        )

    def sums(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        chosen = out[mask]
        far = (chosen - chosen.mean(0)).pow(2).sum(-1)
        return far.mean() + chosen.std() + chosen.max() - chosen.amin() + 0.1 * chosen.norm() + torch.logsumexp(chosen[:, 0], 0)

    def of_one(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        total = out.square().sum(0, keepdim=True)[:, 0]  # torchmetrics' correlation does this
        there = total > 1e-3
        kept = torch.full_like(total, 0.5)
        kept[there] = (total[there] / (1 + total[there])).squeeze()
        return kept.squeeze() + total[there].sum()

    def finite(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        positive = out[:, 0] > out[:, 0].median()  # of what the step computes
        return (
            out[:, 0][positive].sub(out[:, 0].median()).add(0.1).log().mean()
            + (out * mask[:, None].float())[mask].log_softmax(-1).mean()
        )

    def selected(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return torch.masked_select(out, mask[:, None]).mean() + out.masked_select(out > 0).sum() + out[torch.isfinite(out)].mean()

    def parts(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        both = torch.stack([out, 2 * out], 1)
        first = out[mask, 0].mean() + out.T[1, mask].mean() + out[mask, -1].pow(2).mean()
        return first + out[mask, 1:3].pow(2).mean() + both[mask, 1, :2].mean() + both.transpose(0, 1)[:, mask, ::2].pow(2).mean()

    fit(run, regression, classes, sums, finite, selected, parts, of_one)


@case
def rows_that_go_back(run: Run) -> None:
    def assigned(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        made = torch.zeros_like(out)
        made[mask] = self.expert(out[mask])
        made[~mask] += out[~mask].relu()
        return made.pow(2).mean()

    def experts(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        made = torch.zeros_like(out)
        weight = out.softmax(-1)
        for expert in range(3):
            (index,) = torch.where(y == expert)
            made.index_add_(0, index, self.expert(out[index]) * weight[index, expert, None])
        return made.pow(2).mean()

    def places(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        index = mask.nonzero().squeeze(1)
        row, column = torch.where(out > 0)
        return (
            out[index].mean() + (out[row, column] * column).mean() + x[torch.nonzero(mask, as_tuple=True)[0]].mean() * out.mean()
        )

    def edges(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        every = torch.stack([torch.arange(16), torch.arange(16).roll(3)])
        source, target = every[:, mask]
        messages = out[source] - out[target]
        summed = torch.zeros_like(out).index_add(0, target, messages)
        most = torch.zeros_like(out).scatter_reduce(0, target[:, None].expand_as(messages), messages, "amax")
        degree = torch.zeros(16).scatter_add_(0, target, torch.ones_like(target, dtype=torch.float))
        return (summed / degree.clamp(min=1)[:, None]).pow(2).mean() + most.mean()

    def ranks(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        rank = torch.where(out.argsort(1, descending=True) == y[:, None])[1]
        degree = torch.bincount(y[out[:, 0] > out[:, 0].mean()], minlength=4)
        return (out * degree).pow(2).mean() + rank.float().median() + out[out > 0].min() + F.one_hot(y[mask], 4).float().mean()

    fit(run, assigned, experts, places, edges, ranks)


@case
def splines_of_selected_rows(run: Run) -> None:
    def splines(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """As normalizing flows write them: identity outside of an interval, inside of it bins of each element's own."""
        inside = (out > -0.5) & (out < 0.5)
        made = torch.zeros_like(out)
        made[~inside] = out[~inside]
        widths, within = torch.stack([out, 2 * out, out.sin()], -1).softmax(-1)[inside, :], out[inside]
        if torch.min(within) < -0.5 or widths.shape[-1] * 0.01 > 1:
            raise ValueError
        knots = F.pad(widths.cumsum(-1), (1, 0)) - 0.5
        knots[..., 0] = -0.6
        knots[..., -1] += 0.1
        place = torch.searchsorted(knots.detach(), within.detach()[..., None]) - 1
        made[inside] = (within - knots.gather(-1, place)[..., 0]) / widths.gather(-1, place)[..., 0]
        return made.pow(2).mean()

    fit(run, splines)


class Packing(pl.LightningModule):
    """Recurrent layers over packed sequences."""

    def __init__(self, kind: type[nn.RNNBase], options: dict[str, Any], packing: dict[str, Any], way: str = "padded") -> None:
        super().__init__()
        self.batch_first = options.get("batch_first", False)
        self.recurrent: Any = kind(3, 5, **options)
        self.head = nn.LazyLinear(4)
        self.head(torch.zeros(1, 10 if options.get("bidirectional") else 5))
        self.packing, self.way = packing, way

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y, _, lengths = batch
        steps = torch.stack([x[:, :3], x[:, 3:], x[:, ::2], x[:, 1::2], x[:, 1:4], x[:, 2:5]], 1 if self.batch_first else 0)
        if self.packing.get("enforce_sorted", True):
            lengths = lengths.sort(descending=True).values
        given = lengths.tolist() if self.way == "list" else lengths.cpu()
        packed = pack_padded_sequence(steps, given, batch_first=self.batch_first, **self.packing)
        if self.way == "states":
            states = self.recurrent(packed)[1]
            out, states = self.recurrent(packed, states)
        else:
            out, states = self.recurrent(packed)
        last = states[0] if isinstance(states, tuple) else states
        loss = F.cross_entropy(self.head(torch.cat([*last[-2:]], -1) if self.head.in_features == 10 else last[-1]), y)
        if self.way == "data":
            scores = PackedSequence(self.head(out.data), *out[1:])
            targets = pack_padded_sequence(steps[..., 0].gt(0).long(), given, batch_first=self.batch_first, **self.packing)
            return loss + F.cross_entropy(scores.data, targets.data)
        total = 6 if self.way == "total" else None
        padded, again = pad_packed_sequence(out, batch_first=self.batch_first, padding_value=-0.5, total_length=total)
        self.log("lengths", again.float().mean())
        return loss + padded.pow(2).mean() + padded.abs().amax(1 if self.batch_first else 0).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def pack(run: Run, kind: type[nn.RNNBase], options: dict[str, Any], way: str = "padded", **packing: Any) -> None:
    run.fit(Packing(kind, options, packing, way), run.trainer(max_epochs=1, limit_train_batches=4), run.loader(*rows()))


@case
def packed_lstm(run: Run) -> None:
    pack(run, nn.LSTM, {"batch_first": True, "bidirectional": True, "num_layers": 2}, enforce_sorted=False)


@case
def packed_gru_by_time(run: Run) -> None:
    pack(run, nn.GRU, {"num_layers": 2}, "list", enforce_sorted=True)


@case
def packed_rnn_with_states(run: Run) -> None:
    pack(run, nn.RNN, {"batch_first": True, "nonlinearity": "relu", "bias": False}, "states", enforce_sorted=False)


@case
def packed_data(run: Run) -> None:
    pack(run, nn.LSTM, {"batch_first": True}, "data", enforce_sorted=False)


@case
def packed_to_a_length(run: Run) -> None:
    pack(run, nn.GRU, {"batch_first": True, "bidirectional": True}, "total", enforce_sorted=False)


@case
def numbers_of_rows(run: Run) -> None:
    """How many rows the step's own outputs select, in branches and in arithmetic."""

    def pairs(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        near = torch.cdist(out, out) < 0.9
        if all(len(one) <= 1 for one in torch.where(near)):
            return out.square().mean()
        return out[near.any(1)].square().mean()

    def weighted(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count, total = 0, out.new_zeros(())
        for number in range(4):
            chosen = out[(y == number) & (out[:, 0] > -0.4)]
            if chosen.shape[0] < 2:
                continue
            count += len(chosen)
            total = total + chosen.square().sum() / chosen.size(0) + 0.01 * chosen.numel() * out.mean()
        return total / max(count, 1) * (1 / (1 + count))

    fit(run, pairs, weighted)


@case
def rows_for_as_many_places(run: Run) -> None:
    """What a mask that the step computes selects gets rows of another tensor, as unused codes get samples."""

    def codes(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        kept = self.kept
        unused = out.detach().square().sum(1) > 0.35
        number = unused.sum().item()
        samples = out[out.shape[0] // 2 :].flip(0)
        if number > len(samples):
            return out.mean()
        kept[unused] = samples[:number].detach()
        self.uses[unused] = 2.0
        made = out * 1.0
        made[unused] = samples.roll(1, 0)[:number] * 2
        counted = torch.zeros(4).scatter_(0, y[unused], 1, reduce="add") + torch.zeros(4).scatter(0, y[unused], 0.5)
        return made.square().mean() + kept.mean() + out[:number, 0].sum() + (out * counted).mean()

    def first(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        largest = torch.zeros(16).index_fill(0, out[:, 0].topk(5).indices, 1.0) > 0
        made = out.sin()
        made[largest] = self.expert(out[:5])
        return made.square().mean()

    def of_lengths(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        end = (out.detach()[:, 0].argmax() + 1).item()
        return out[:end].square().mean() + out.T[:2, :end].std() + torch.cat([out[:end], out[mask]]).mean()

    fit_with_codes(run, codes, first, of_lengths)


def fit_with_codes(run: Run, *losses: Loss) -> None:
    model = Selecting(list(losses))
    model.register_buffer("kept", torch.ones(16, 4))
    model.register_buffer("uses", torch.zeros(16))
    run.fit(model, run.trainer(max_epochs=1), run.loader(*rows()))


@case
def first_rows_that_are_written_to(run: Run) -> None:
    """As many as the step finds, in a view of the tensor."""

    def written(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        number = (out[:, 0] > 0.1).sum().item() // 4
        made = out.sin()
        before = made[:number]
        made[:number].mul_(3.0)
        made[:, :2] += 1.0
        return made.square().mean() + before.sum()

    fit_with_codes(run, written)


@case
def divided_by_no_rows(run: Run) -> None:
    """Python raises before the step is taken."""

    def inverse(self: Selecting, x: Tensor, out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return out.mean() / (6 // len(out[out[:, 0] > (0.2 if len(self.seen) < 2 else 9.0)]) + 1)

    fit(run, inverse)


if __name__ == "__main__":
    main()
