"""transformers: BART with padded inputs and labels."""

import recorder
import torch
from transformers import BartConfig, BartForConditionalGeneration

recorder.seed()
layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "max_position_embeddings": 32}
model = BartForConditionalGeneration(BartConfig(**layers, **widths, dropout=0.0))
ids = torch.randint(4, 64, (16, 12))
lengths = torch.randint(5, 13, (16, 1))
there = torch.arange(12) < lengths
ids = ids.where(there, torch.tensor(1))
recorder.fit(
    model,
    lambda net, ids, there: net(input_ids=ids, attention_mask=there.long(), labels=ids.masked_fill(~there, -100)).loss,
    [ids, there],
    batch_size=8,
    data_parallel=False,
)
