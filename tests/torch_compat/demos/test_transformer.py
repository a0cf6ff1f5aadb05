"""The transformer of the demonstrations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_compat.demos.transformer import LightningTransformer, PositionalEncoding, Transformer, WikiText2


def test_log_probabilities_of_every_word() -> None:
    model = Transformer(vocab_size=11).eval()
    words = torch.arange(6).view(2, 3)
    output = model(words, words)
    assert output.shape == (6, 11)
    torch.testing.assert_close(output.exp().sum(1), torch.ones(6))


def test_a_position_does_not_see_later_targets() -> None:
    model = Transformer(vocab_size=11).eval()
    words, target = torch.arange(3).view(1, 3), torch.arange(3).view(1, 3)
    before = model(words, target)
    target[0, 2] = 9
    after = model(words, target)
    torch.testing.assert_close(after[:2], before[:2])
    assert not torch.allclose(after[2], before[2])


def test_training_step() -> None:
    module = LightningTransformer(vocab_size=11).eval()
    words = torch.arange(6).view(2, 3)
    expected = -module(words, words).gather(1, words.view(-1, 1)).mean()
    torch.testing.assert_close(module.training_step((words, words), 0), expected)


def test_too_long_a_sequence() -> None:
    with pytest.raises(ValueError, match="5 tokens is too long for `max_len=5`"):
        PositionalEncoding(4, max_len=5)(torch.zeros(1, 5, 4))


def test_wikitext_blocks_and_their_next_words(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2.txt").write_text("a b c\n\nd a\n" * 4)
    data = WikiText2(tmp_path, block_size=5, download=False)
    assert data.vocab_size == 5
    assert len(data) == 5  # 32 words, and the last block needs a word after it
    block, following = data[0]
    assert block.tolist() == [0, 1, 2, 3, 3]
    assert following.tolist() == [1, 2, 3, 3, 4]
    assert len(list(data)) == len(data)
    with pytest.raises(FileNotFoundError):
        WikiText2(tmp_path / "nothing", download=False)
