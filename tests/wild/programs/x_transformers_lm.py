"""x-transformers: a decoder with rotary positions, wrapped for next-token loss."""

import recorder
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

recorder.seed()
model = TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=2, rotary_pos_emb=True))
recorder.fit(AutoregressiveWrapper(model), lambda net, x: net(x), [torch.randint(0, 100, (64, 13))], batch_size=16)
