"""``model.generate(…)`` of ``transformers`` in steps: stock's tokens, and never a graph of every token."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from tests import warm
from torch_compat import LightningModule, Trainer

TOKENS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Generates(LightningModule):
    """A module whose steps generate from a batch of prompts, the arguments of ``generate``."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def predict_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.generate(**batch, **self.options)


def spread(model: Any) -> Any:
    """The model with weights so large that its tokens differ."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        if param.ndim > 1:
            param.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def gpt2() -> Any:
    return spread(GPT2LMHeadModel(GPT2Config(vocab_size=32, n_layer=2, n_head=2, n_embd=32, n_positions=64, **TOKENS)))


def llama() -> Any:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return spread(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes, **heads, **TOKENS)))


def t5() -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    return spread(T5ForConditionalGeneration(T5Config(vocab_size=32, **sizes, **tokens)))


def prompts(seed: int = 0, rows: int = 4, padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 32, (rows, 5), generator=torch.Generator().manual_seed(seed))
    if padded:
        ids[::2, :2] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def predicted(model: Any, *batches: dict[str, torch.Tensor], devices: int = 1, **options: Any) -> tuple[list[Any], Any]:
    """What a predict step gives for each batch, and the log of its executor."""
    trainer = Trainer(accelerator="cpu", devices=devices, logger=False, enable_progress_bar=False)
    found: Any = trainer.predict(Generates(model, **options), DataLoader(list(batches), batch_size=None))  # pyright: ignore
    steps: Any = trainer.executor.steps
    return [one.tolist() for one in found], steps.log


def of_the_library(model: Any, *batches: dict[str, torch.Tensor], **options: Any) -> list[Any]:
    return [model.generate(**batch, **options).tolist() for batch in batches]


@pytest.mark.parametrize("make", [gpt2, t5])
def test_greedy_search_is_a_loop_of_the_program(make: Any) -> None:
    model, batches = make(), (prompts(0, padded=True), prompts(1, padded=True))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    found, log = predicted(model, *batches, **options)
    assert found == of_the_library(model, *batches, **options)
    assert (log.fallback, log.variants) == (None, 1)


ENDS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": list(range(2, 10))}


class Tells(Generates):
    """What it generates goes to the host alone, as texts too."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(32)}, unk_token="w3"))
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")
        self.lists: list[list[list[int]]] = []

    def predict_step(self, batch: dict[str, torch.Tensor]) -> Any:
        tokens = super().predict_step(batch)
        self.lists.append(tokens.tolist())
        return self.tokenizer.batch_decode(tokens[:, 5:], skip_special_tokens=True), tokens


def test_one_program_serves_sequences_of_every_length() -> None:
    model, batches = gpt2(), [prompts(seed, padded=True) for seed in range(3)]
    module = Tells(model, **ENDS)
    expected = [module.predict_step(batch) for batch in batches]
    lists, module.lists = module.lists, []
    trainer = Trainer(accelerator="cpu", devices=4, logger=False, enable_progress_bar=False)
    found: Any = trainer.predict(module, DataLoader(batches, batch_size=None))  # pyright: ignore
    steps: Any = trainer.executor.steps
    assert [texts for texts, _ in found] == [texts for texts, _ in expected]
    assert [tokens.tolist() for _, tokens in found] == [tokens.tolist() for _, tokens in expected]
    assert module.lists == lists
    assert len({tokens.shape for _, tokens in found}) > 1
    assert (steps.log.fallback, steps.log.variants) == (None, 1)


class Measures(Generates):
    """The length of what it generates decides about the program."""

    def predict_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = super().predict_step(batch)
        return self.model(tokens).logits.sum(-1) * tokens.shape[1]


def test_an_op_gets_sequences_as_long_as_they_are() -> None:
    model, batch = gpt2(), prompts(padded=True)
    module = Measures(model, **ENDS)
    with torch.no_grad():
        expected = module.predict_step(batch)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    (found,) = trainer.predict(module, DataLoader([batch], batch_size=None))  # pyright: ignore
    steps: Any = trainer.executor.steps
    assert (steps.log.fallback, steps.log.variants) == (None, 2)  # the longest is tried first
    assert expected.shape[1] < 25
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_processors_of_a_generation_config_do_as_in_the_library() -> None:
    model, batch = gpt2(), prompts(padded=True)
    model.generation_config.update(repetition_penalty=1.3, no_repeat_ngram_size=2, min_new_tokens=6, forced_eos_token_id=2)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": [2, *range(10, 20)]}
    found, log = predicted(model, batch, **options)
    assert (found, log.fallback) == (of_the_library(model, batch, **options), None)


@pytest.mark.parametrize(("make", "early"), [(gpt2, True), (t5, False)])
def test_beams_are_those_of_the_library(make: Any, early: bool) -> None:
    model, batch = make(), prompts(padded=True)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 1.5,
        "early_stopping": early,
    }
    options["eos_token_id"] = [2, 5, 7]
    found, log = predicted(model, batch, **options)
    assert (found, log.fallback) == (of_the_library(model, batch, **options), None)


def test_samples_are_of_the_likeliest_and_differ_from_batch_to_batch() -> None:
    model, batch = llama(), prompts()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "temperature": 3.0, "top_k": 2, "eos_token_id": None}
    found, log = predicted(model, batch, batch, devices=4, **options)
    assert (log.fallback, log.variants) == (None, 1)
    assert found[0] != found[1]
    for tokens in map(torch.tensor, found):
        likeliest = model(tokens[:, :-1]).logits[:, 4:].topk(2).indices
        assert (likeliest == tokens[:, 5:, None]).any(-1).all()
        assert not (likeliest[..., 0] == tokens[:, 5:]).all()


def test_decoding_that_stays_in_python_runs_eagerly_for_its_reason() -> None:
    model, batch = gpt2(), prompts(rows=1)
    options: dict[str, Any] = {"max_new_tokens": 8, "prompt_lookup_num_tokens": 2}
    with pytest.warns(UserWarning, match="generate is given prompt_lookup_num_tokens"):
        found, log = predicted(model, batch, **options)
    assert "generate is given prompt_lookup_num_tokens" in log.fallback
    assert found == of_the_library(model, batch, **options)


@pytest.mark.slow
def test_a_policy_learns_of_what_it_generates_in_one_program(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    environment = {**os.environ, "XLATRAIN_REPORT": str(report), "XLATRAIN_EXECUTOR": "compiled"}
    example = Path(__file__).parents[3] / "examples" / "grpo.py"
    done = warm.run(warm.OURS, ["-m", "torch_compat", str(example)], env=environment, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.splitlines()[-1].removeprefix("60 steps, reward ")) > 0.9  # 0.5 at first
    (run,) = json.loads(report.read_text())["runs"]
    assert (run["executor"], run["mesh"]["data"], run["variants"]) == ("compiled", 8, 1)
