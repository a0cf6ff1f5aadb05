"""transformers: Whisper on spectrograms."""

import recorder
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

recorder.seed()
layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16}
tokens = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
config = WhisperConfig(**layers, **widths, **tokens, max_source_positions=20, max_target_positions=16, dropout=0.0)
recorder.fit(
    WhisperForConditionalGeneration(config),
    lambda net, sound, labels: net(input_features=sound, labels=labels).loss,
    [torch.randn(16, 16, 40), torch.randint(3, 64, (16, 8))],
    batch_size=8,
)
