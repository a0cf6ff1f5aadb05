"""transformers: a GPT-2 and a T5 from scratch."""

import recorder
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

ids = torch.randint(1, 100, (64, 12))
recorder.seed()
gpt = GPT2LMHeadModel(
    GPT2Config(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
)
recorder.fit(gpt, lambda net, x: net(x, labels=x).loss, [ids], batch_size=16)
recorder.seed()
t5 = T5ForConditionalGeneration(
    T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
)
recorder.fit(t5, lambda net, x: net(input_ids=x, labels=x).loss, [ids], batch_size=16)
