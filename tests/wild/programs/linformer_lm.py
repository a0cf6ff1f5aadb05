"""linformer: attention whose keys are projected to few."""

import recorder
import torch
from linformer import LinformerLM

recorder.seed()
model = LinformerLM(num_tokens=32, dim=16, seq_len=32, depth=2, heads=2, dim_head=8, k=8)
x = torch.randint(0, 32, (32, 32))
recorder.fit(model, lambda net, x: torch.nn.functional.cross_entropy(net(x).transpose(1, 2), x), [x], batch_size=8)
