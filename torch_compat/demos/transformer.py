"""A small encoder-decoder transformer on WikiText-2 (``lightning.pytorch.demos.transformer``).

The model is the one of PyTorch's word-language-model example: Vaswani et al., "Attention Is All You Need" (2017).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torch_compat.core.module import LightningModule

_WIKITEXT2_URL = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class Transformer(nn.Module):
    """Predicts each next word.

    Args:
        vocab_size: number of words.
        ninp: width of the embeddings.
        nhead: attention heads.
        nhid: width of the feed-forward layers.
        nlayers: layers of encoder and of decoder.
        dropout: probability of all dropouts.
    """

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(
            d_model=ninp,
            nhead=nhead,
            num_encoder_layers=nlayers,
            num_decoder_layers=nlayers,
            dim_feedforward=nhid,
            dropout=dropout,
            batch_first=True,
        )
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp = ninp
        self.vocab_size = vocab_size

    def generate_square_subsequent_mask(self, size: int) -> Tensor:
        """The causal mask, ``(size, size)``: 0 where a position may look, -inf where not."""
        return torch.full((size, size), float("-inf"), device=self.embedding.weight.device).triu(1)

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log probabilities ``(batch * length, vocab_size)`` from two int64 tensors ``(batch, length)``."""
        if mask is None:
            mask = self.generate_square_subsequent_mask(inputs.shape[1])
        source = self.pos_encoder(self.embedding(inputs) * math.sqrt(self.ninp))
        embedded = self.pos_encoder(self.embedding(target) * math.sqrt(self.ninp))
        output = self.decoder(self.transformer(source, embedded, tgt_mask=mask))
        return F.log_softmax(output, dim=-1).view(-1, self.vocab_size)


class PositionalEncoding(nn.Module):
    """Adds sines and cosines to ``(batch, length, dim)``, then drops out.

    As in Lightning, whose numbers this demonstration gives, every position of a sequence gets the encoding of the position
    after its last one: the model knows of order only by its causal mask.
    """

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.dim = dim
        self.max_len = max_len

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self._encoding(x.size(1), x.device))

    def _encoding(self, position: int, device: torch.device) -> Tensor:
        if position >= self.max_len:
            raise ValueError(f"a sequence of {position} tokens is too long for `max_len={self.max_len}`")
        frequency = torch.exp(torch.arange(0, self.dim, 2, device=device) * (-math.log(10000.0) / self.dim))
        angles = position * frequency
        return torch.stack([torch.sin(angles), torch.cos(angles)], dim=-1).flatten()


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of words of WikiText-2's training text, each with the block of the words that follow.

    Args:
        data_dir: folder of ``wikitext-2.txt``.
        block_size: words in a block.
        download: fetch the file (10 MB) if it is not there.

    Raises:
        FileNotFoundError: the file is not there and ``download`` is False.
    """

    def __init__(self, data_dir: Path = Path("data"), block_size: int = 35, download: bool = True) -> None:
        self.path = Path(data_dir) / "wikitext-2.txt"
        if download and not self.path.exists():
            _download(self.path)
        self.data, self.dictionary = tokenize(self.path)
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """The number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.block_size
        end = start + self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]


class Dictionary:
    """Words and their numbers, in the order in which they came."""

    def __init__(self) -> None:
        self.word2idx: dict[str, int] = {}
        self.idx2word: list[str] = []

    def add_word(self, word: str) -> int:
        """The number of ``word``, a new one if it is new."""
        if word not in self.word2idx:
            self.word2idx[word] = len(self.idx2word)
            self.idx2word.append(word)
        return self.word2idx[word]

    def __len__(self) -> int:
        return len(self.idx2word)


def tokenize(path: Path) -> tuple[Tensor, Dictionary]:
    """The words of a text file as int64 numbers, every line ended by ``<eos>``, and their dictionary."""
    dictionary = Dictionary()
    with open(path, encoding="utf8") as file:
        numbers = [dictionary.add_word(word) for line in file for word in [*line.split(), "<eos>"]]
    return torch.tensor(numbers, dtype=torch.int64), dictionary


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with urlopen(_WIKITEXT2_URL, timeout=60) as response:
        content = response.read()
    # Written whole: an interrupted download leaves no file that looks complete.
    path.write_bytes(content)


class LightningTransformer(LightningModule):
    """Trains :class:`Transformer` on :class:`WikiText2` by SGD."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        return self.model(inputs, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, target = batch
        return F.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        WikiText2(download=True)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(WikiText2())
