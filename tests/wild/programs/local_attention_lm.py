"""local-attention: a language model that looks at windows, with rotary positions."""

import recorder
import torch
from local_attention import LocalTransformer

recorder.seed()
model = LocalTransformer(
    num_tokens=32, dim=16, depth=2, causal=True, local_attn_window_size=8, max_seq_len=32, heads=2, dim_head=8
)
x = torch.randint(0, 32, (32, 33))
recorder.fit(model, lambda net, x: net(x, return_loss=True), [x], batch_size=8)
