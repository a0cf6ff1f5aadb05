"""Models of ``transformers`` with their own ``_init_weights``: every tensor as in a stock model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from xlatrain.bridge.lazy_init import deferred_init, is_deferred

SIZE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
}  # fmt: skip
IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512}
WHISPER = {
    **{
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))
    },
    "d_model": 64,
    "vocab_size": 512,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "pad_token_id": 0,
}
SWIN = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "image_size": 32, "patch_size": 2, "window_size": 4}
WAVE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 32,
    "conv_dim": (32, 32),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, num_key_value_heads=2)),
    "llama with tied embeddings": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZE, num_key_value_heads=2, num_local_experts=4)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=64)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZE)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE, patch_size=8)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
    "clip": lambda: hf.CLIPModel(hf.CLIPConfig(text_config=SIZE, vision_config={**IMAGE, "patch_size": 8})),
    "swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)),
    "convnext": lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2)),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=512, state_size=8)),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAVE)),
}


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_is_as_in_a_stock_model(name: str) -> None:
    torch.manual_seed(1)
    with deferred_init():
        torchs = tensors(FAMILIES[name]())
    torch.manual_seed(0)
    with deferred_init(torchs_numbers=0):
        found = tensors(FAMILIES[name]())
    torch.manual_seed(1)
    one = tensors(FAMILIES[name]())
    torch.manual_seed(2)
    other = tensors(FAMILIES[name]())
    assert list(found) == list(one)
    assert sum(is_deferred(tensor) for tensor in found.values()) >= 0.9 * len(found)
    tied = {path: [q for q in found if found[q] is tensor] for path, tensor in found.items()}
    assert tied == {path: [q for q in one if one[q] is tensor] for path, tensor in one.items()}
    for path, value in found.items():
        assert torch.equal(torchs[path], one[path]), path
        stock, again = one[path].detach().float(), other[path].detach().float()
        assert (value.shape, value.dtype, value.requires_grad) == (stock.shape, one[path].dtype, one[path].requires_grad), path
        value = value.detach().float()
        if torch.equal(stock, again):
            assert torch.equal(value, stock), path  # rotary tables, masks, biases: torch's own bits
            continue
        spread, count = torch.cat([stock.ravel(), again.ravel()]).std(), value.numel() ** 0.5
        assert not torch.equal(value, stock)
        assert abs(value.mean() - (stock.mean() + again.mean()) / 2) < 6 * spread / count, path
        assert value.numel() < 30 or abs(value.std() / spread - 1) < 5 / count, path
