"""Whole models: loss and every gradient through capture, lowering and ``jax.jit`` equal torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import stateless

from tests.xlatrain.bridge._compare import as_host, assert_matches_eager, run_captured
from xlatrain.bridge.capture.capture import capture
from xlatrain.bridge.errors import CaptureError

Tensors = dict[str, torch.Tensor]


def loss_and_gradients(module: nn.Module, loss_of: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """(parameters, buffers, batch) → loss, gradients by parameter name, new buffers."""

    def step(parameters: Tensors, buffers: Tensors, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor | None], Tensors]:
        with stateless._reparametrize_module(module, {**parameters, **buffers}, tie_weights=True):
            loss = loss_of(module, batch)
            grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            return loss, dict(zip(parameters, grads, strict=True)), {name: b.clone() for name, b in module.named_buffers()}

    return step


def assert_model_matches(
    module: nn.Module, loss_of: Callable[..., torch.Tensor], batch: Any, *, rtol: float = 1e-4, skip: tuple[str, ...] = ()
) -> None:
    """Loss, gradients and buffers are those of eager torch.

    A gradient's error is measured against the largest element of that gradient: rounding of the sums that make it is relative to
    their terms, not to each result. ``skip`` names parameters whose true gradient is zero.
    """
    parameters = {name: p.detach().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    step = loss_and_gradients(module, loss_of)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    frozen = {**buffers, **{name: p for name, p in parameters.items() if not p.requires_grad}}
    loss, grads, new_buffers = run_captured(step, trained, frozen, batch)
    cloned = {name: b.clone() for name, b in frozen.items()}
    expected_loss, expected_grads, expected_buffers = as_host(step(trained, cloned, batch))
    np.testing.assert_allclose(loss, expected_loss, rtol=rtol)
    assert {name for name, grad in grads.items() if grad is None} == {n for n, grad in expected_grads.items() if grad is None}
    assert any(grad is not None for grad in grads.values())
    for name, expected in expected_grads.items():
        if expected is not None and not name.endswith(skip or ("\0",)):
            largest = float(np.abs(expected).max())
            np.testing.assert_allclose(grads[name], expected, rtol=rtol, atol=rtol * max(largest, 1e-5), err_msg=name)
    for name, expected in expected_buffers.items():
        np.testing.assert_allclose(new_buffers[name], expected, rtol=rtol, atol=1e-6, err_msg=name)


def tokens(*shape: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, groups=2),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Dropout(p=0.0),
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).flatten(1))


def test_cnn_with_batch_norm() -> None:
    torch.manual_seed(0)
    batch = values(4, 3, 10, 10), torch.tensor([0, 4, 2, 1])
    assert_model_matches(ConvNet(), lambda net, b: nn.functional.cross_entropy(net(b[0]), b[1]), batch)


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True),
    "lstm without bias": lambda: nn.LSTM(5, 6, bias=False),
    "lstm projected": lambda: nn.LSTM(5, 6, proj_size=3, batch_first=True),
    "gru": lambda: nn.GRU(5, 6, num_layers=2, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(5, 6, num_layers=2),
    "rnn relu": lambda: nn.RNN(5, 6, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output, state = net(x)
        return output.pow(2).mean() + sum(s.sin().sum() for s in (state if isinstance(state, tuple) else (state,)))

    torch.manual_seed(0)
    assert_model_matches(RECURRENT[name](), loss_of, values(3, 7, 5))


def test_recurrent_given_states() -> None:
    def fn(x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with stateless._reparametrize_module(net, dict(zip(names, weights, strict=True))):
            y, (h, c) = net(x, (h0, c0))
        loss = y.pow(2).sum() + h.sum() + c.pow(3).sum()
        return loss, *torch.autograd.grad(loss, (x, h0, c0, *weights))

    torch.manual_seed(0)
    net = nn.LSTM(5, 6)
    names, weights = zip(*net.named_parameters(), strict=True)
    states = [values(1, 3, 6).requires_grad_() for _ in range(2)]
    assert_matches_eager(fn, values(7, 3, 5).requires_grad_(), *states, *weights, rtol=1e-4, atol=1e-5)


def torch_has_half_lstms() -> bool:
    """Without AVX-512 oneDNN has no bfloat16 LSTM, and torch no other under autocast: there is nothing to compare with."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            nn.LSTM(1, 1)(torch.zeros(1, 1, 1))
        except RuntimeError as error:
            assert "could not create a primitive" in str(error)
            return False
    return True


@pytest.mark.parametrize(("name", "dtype"), [("lstm", torch.bfloat16), ("gru", torch.float32)])
def test_recurrent_under_autocast(name: str, dtype: torch.dtype) -> None:
    if name == "lstm" and not torch_has_half_lstms():
        pytest.skip("torch itself has no bfloat16 LSTM for this CPU")

    def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = net(x)
        assert output.dtype == dtype
        return output.float().pow(2).mean()

    torch.manual_seed(0)
    assert_model_matches(RECURRENT[name](), loss_of, values(3, 7, 5), rtol=3e-2)


def test_long_recurrence_stays_one_loop() -> None:
    net = nn.LSTM(5, 6, num_layers=2)
    graph = capture(lambda x: net(x)[0].sum(), values(500, 3, 5)).graph.graph
    assert len(graph.nodes) < 60
    assert sum(node.target is torch.ops.xlatrain.recurrence.default for node in graph.nodes) == 2


def test_double_backward_of_recurrence_is_refused() -> None:
    net = nn.GRU(5, 6)

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(net(x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), x)[0]

    with pytest.raises(CaptureError, match=r"nn\.GRUCell"):
        capture(penalty, values(4, 3, 5).requires_grad_())


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first, activation="gelu")
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    assert_model_matches(net, lambda net, x: net(x, mask=mask, is_causal=norm_first or None).pow(3).mean(), values(3, 6, 16))


def test_transformer_with_masks_made_in_the_step_also_in_eval() -> None:
    torch.manual_seed(0)
    net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def output(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        padding = torch.arange(x.shape[1]) >= torch.tensor([[6], [4]])
        return net(x, x, src_mask=mask, tgt_mask=mask, tgt_key_padding_mask=padding).pow(3).mean()

    assert_model_matches(net, output, values(2, 6, 16))
    assert_matches_eager(torch.no_grad()(lambda x: output(net.eval(), x)), values(2, 6, 16))


def test_an_encoder_that_might_nest_its_padding_is_refused() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 1)
    padding = torch.tensor([[6], [4]])

    def output(x: torch.Tensor) -> torch.Tensor:
        return net(x, src_key_padding_mask=torch.arange(x.shape[1]) >= padding)

    assert_matches_eager(output, values(2, 6, 16))
    net.eval()
    with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        capture(torch.no_grad()(output), values(2, 6, 16))
    net.use_nested_tensor = False
    assert_matches_eager(torch.no_grad()(output), values(2, 6, 16))


TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**TEXT, "num_hidden_layers": 2}, num_key_value_heads=2, max_position_embeddings=32))


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **TEXT, num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, output_router_logits=True
    )
    return MixtralForCausalLM(config)


CAUSAL = {"gpt2": _gpt2, "llama": _llama, "mixtral": _mixtral}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "padded"), [("gpt2", False), ("gpt2", True), ("llama", True), ("mixtral", True)])
def test_causal_language_model(name: str, padded: bool) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = CAUSAL[name]().train()
    batch = {"input_ids": tokens(2, 9, vocabulary=50)}
    batch["labels"] = batch["input_ids"].clone()
    if padded:
        batch["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
        batch["labels"][1, 6:] = -100
    assert_model_matches(model, lambda net, b: net(**b).loss, batch)


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_under_autocast(use_reentrant: bool) -> None:
    pytest.importorskip("transformers")

    def loss_of(model: nn.Module, batch: Tensors) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    torch.manual_seed(0)
    model = _llama().train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # pyright: ignore[reportCallIssue]
    model.enable_input_require_grads() if use_reentrant else None  # pyright: ignore[reportCallIssue]
    batch = {"input_ids": tokens(2, 9, vocabulary=50), "labels": tokens(2, 9, vocabulary=50)}
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    loss, grads, _ = run_captured(loss_and_gradients(model, loss_of), parameters, buffers, batch)
    model.gradient_checkpointing_disable()  # pyright: ignore[reportCallIssue]
    expected_loss, expected_grads, _ = as_host(loss_and_gradients(model, loss_of)(parameters, buffers, batch))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-2)
    for name, expected in expected_grads.items():
        np.testing.assert_allclose(grads[name], expected, rtol=0.1, atol=0.05 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
def test_bert() -> None:
    pytest.importorskip("transformers")
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**TEXT, max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)
    batch = {
        "input_ids": tokens(2, 8, vocabulary=50),
        "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
        "token_type_ids": torch.tensor([[0] * 4 + [1] * 4] * 2),
        "labels": torch.tensor([1, 2]),
    }
    assert_model_matches(BertForSequenceClassification(config).train(), lambda net, b: net(**b).loss, batch)


@pytest.mark.slow
def test_t5() -> None:
    pytest.importorskip("transformers")
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0, decoder_start_token_id=0
    )
    batch = {"input_ids": tokens(2, 8, vocabulary=50), "labels": tokens(2, 6, vocabulary=50)}
    assert_model_matches(T5ForConditionalGeneration(config).train(), lambda net, b: net(**b).loss, batch)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    small = {key: TEXT[key] for key in TEXT if key != "vocab_size"}
    return ViTForImageClassification(
        ViTConfig(**small, image_size=16, patch_size=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=3)
    )


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="bottleneck", num_labels=3)
    )


def _convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3, image_size=16)
    )


IMAGES = {"vit": _vit, "resnet": _resnet, "convnext": _convnext}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGES)
def test_image_classifier(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    batch = {"pixel_values": values(4, 3, 16, 16), "labels": torch.tensor([0, 2, 1, 2])}
    assert_model_matches(IMAGES[name]().train(), lambda net, b: net(**b).loss, batch)


@pytest.mark.slow
def test_whisper() -> None:
    pytest.importorskip("transformers")
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=50, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10, max_target_positions=12,
        dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    batch = {"input_features": values(2, 8, 20), "labels": tokens(2, 6, vocabulary=50)}
    assert_model_matches(WhisperForConditionalGeneration(config).train(), lambda net, b: net(**b).loss, batch)
