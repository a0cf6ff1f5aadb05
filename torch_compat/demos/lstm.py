"""A small LSTM language model. API: ``lightning.pytorch.demos.lstm``. Architecture: https://arxiv.org/abs/1409.2329."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Sampler

from torch_compat.core.module import LightningModule
from torch_compat.demos.transformer import WikiText2


class SimpleLSTM(nn.Module):
    """Embedding, LSTM, linear: log-probabilities of the next word.

    Args:
        vocab_size: number of words.
        ninp: size of the embedding.
        nhid: size of the LSTM's state.
        nlayers: number of its layers.
        dropout: probability, after the embedding, between layers and before the decoder.
    """

    def __init__(self, vocab_size: int = 33278, ninp: int = 512, nhid: int = 512, nlayers: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.nlayers = nlayers
        self.nhid = nhid
        self.vocab_size = vocab_size
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocab_size, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(nhid, vocab_size)
        self.init_weights()

    def init_weights(self) -> None:
        """Small uniform weights, no bias in the decoder."""
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Log-probabilities, float ``[batch * length, vocab_size]``, of words, int64 ``[batch, length]``; and the next state."""
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.vocab_size)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """Zero states, ``[nlayers, batch_size, nhid]`` each."""
        weight = self.decoder.weight
        return (
            weight.new_zeros(self.nlayers, batch_size, self.nhid),
            weight.new_zeros(self.nlayers, batch_size, self.nhid),
        )


class SequenceSampler(Sampler[list[int]]):
    """A batch sampler of parallel sequences: row ``i`` of a batch continues row ``i`` of the batch before."""

    def __init__(self, dataset: Sized, batch_size: int) -> None:
        super().__init__()
        self.dataset = dataset
        self.batch_size = batch_size
        self.chunk_size = len(dataset) // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(self.chunk_size):
            yield list(range(first, self.chunk_size * self.batch_size, self.chunk_size))

    def __len__(self) -> int:
        return self.chunk_size


class LightningLSTM(LightningModule):
    """:class:`SimpleLSTM` trained on WikiText2, its state carried from batch to batch."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = SimpleLSTM(vocab_size=vocab_size)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_end(self) -> None:
        self.hidden = None

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        input, target = batch
        if self.hidden is None:
            self.hidden = self.model.init_hidden(input.size(0))
        hidden = (self.hidden[0].detach(), self.hidden[1].detach())
        output, self.hidden = self.model(input, hidden)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def prepare_data(self) -> None:
        WikiText2(download=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        dataset = WikiText2()
        return DataLoader(dataset, batch_sampler=SequenceSampler(dataset, batch_size=20))

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=20.0)


__all__ = ["LightningLSTM", "SequenceSampler", "SimpleLSTM"]
