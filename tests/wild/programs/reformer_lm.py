"""reformer-pytorch: reversible layers, with full attention since LSH draws its buckets."""

import recorder
import torch
from reformer_pytorch import ReformerLM

recorder.seed()
model = ReformerLM(
    num_tokens=32, dim=16, depth=2, max_seq_len=32, heads=2, bucket_size=8, n_hashes=2, causal=True, full_attn_thres=64
)
x = torch.randint(0, 32, (32, 32))
recorder.fit(model, lambda net, x: torch.nn.functional.cross_entropy(net(x).transpose(1, 2), x), [x], batch_size=8)
