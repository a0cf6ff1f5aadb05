"""Batches that have another size each: graphs, and sequences padded to the longest of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from recording import GLOBAL_BATCH, Run, case, main
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

STEPS = 6


class Step(pl.LightningModule):
    """A training and a validation step of one loss, and a net's outputs that the host keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _ = self.loss_of(batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The loss of a batch, and what the net gives for it."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, outputs = self.loss_of(batch)
        self.log("validation", loss, batch_size=1)
        self.kept.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("kept", torch.cat([one.flatten() for one in self.kept]).abs().mean())
        self.kept.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(run: Run, model: Step, samples: Sequence[Any], collate: Callable[[list[Any]], Any]) -> None:
    torch.manual_seed(3)
    train, validation = (
        DataLoader(part, batch_size=run.batch_size, collate_fn=collate)  # pyright: ignore[reportArgumentType]
        for part in (samples, samples[: 4 * GLOBAL_BATCH])
    )
    run.fit(model, run.trainer(max_epochs=1, num_sanity_val_steps=0), train, validation)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def sizes_between(low: int, high: int, made: torch.Generator) -> list[int]:
    return torch.randint(low, high, (STEPS * GLOBAL_BATCH,), generator=made).tolist()


class GraphNet(Step):
    """Two layers of messages along edges, normalized by degree, batch norm over nodes, and classes of whole graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.BatchNorm1d(6)

    def messages(self, layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = x.new_zeros(x.size(0)).scatter_add_(0, target, x.new_ones(edges.size(1)))
        scale = degree.clamp(min=1).rsqrt()
        return x.new_zeros(x.size(0), 6).index_add_(0, target, layer(x)[source] * (scale[source] * scale[target]).unsqueeze(-1))

    def loss_of(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        x, edges, graph, y = batch["x"], batch["edge_index"], batch["batch"], batch["y"]
        x = F.relu(self.norm(self.messages(self.first, x, edges)))
        x = F.dropout(self.messages(self.second, x, edges), 0.0, self.training)
        total = x.new_zeros(len(y), 6).index_add(0, graph, x)
        largest = x.new_full((len(y), 6), -9.0).scatter_reduce(0, graph[:, None].expand_as(x), x, "amax")
        scores = self.last(total / torch.bincount(graph, minlength=len(y)).clamp(min=1)[:, None] + largest)
        return F.cross_entropy(scores, y) + 0.01 * x.pow(2).mean(), x


@case
def graphs(run: Run) -> None:
    made = generator()
    nodes = sizes_between(2, 6, made)
    samples = [
        (torch.randn(n, 3, generator=made), torch.randint(0, n, (2, 2 * n - 1), generator=made), index % 2)
        for index, n in enumerate(nodes)
    ]

    def collate(graphs: list[Any]) -> dict[str, Tensor]:
        starts = [sum(len(x) for x, _, _ in graphs[:place]) for place in range(len(graphs))]
        return {
            "x": torch.cat([x for x, _, _ in graphs]),
            "edge_index": torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts, strict=True)], 1),
            "batch": torch.cat([torch.full((len(x),), place) for place, (x, _, _) in enumerate(graphs)]),
            "y": torch.tensor([y for _, _, y in graphs]),
        }

    fit(run, GraphNet(), samples, collate)


class Sequences(Step):
    """Attention over the sequence with a causal mask, positions, and a loss of the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(12, 8, padding_idx=0), nn.Embedding(32, 8)
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)
        self.last = nn.Linear(8, 12)

    def loss_of(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        x, y = batch[:, :-1], batch[:, 1:]
        mask = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device), 1)
        h = self.tokens(x) + self.places(torch.arange(x.size(1), device=x.device))
        h = h + self.attention(h, h, h, attn_mask=mask, key_padding_mask=x == 0, need_weights=False)[0]
        scores = self.last(self.norm(h))
        return F.cross_entropy(scores.reshape(-1, 12), y.reshape(-1), ignore_index=0), scores


def fit_sequences(run: Run, model: Sequences) -> None:
    made = generator()
    longest = (9, 14, 7, 21, 24, 11)
    lengths = [longest[index // GLOBAL_BATCH] - index % 4 for index in range(STEPS * GLOBAL_BATCH)]
    samples = [torch.randint(1, 12, (length,), generator=made) for length in lengths]
    fit(run, model, samples, lambda rows: pad_sequence(rows, batch_first=True))


@case
def sequences(run: Run) -> None:
    fit_sequences(run, Sequences())


@case
def sequences_by_hand(run: Run) -> None:
    class ByHand(Sequences):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer, loss = self.optimizers(), super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    fit_sequences(run, ByHand())


if __name__ == "__main__":
    main()
