"""nystrom-attention: attention by landmarks and an iterated pseudo-inverse."""

import recorder
import torch
from nystrom_attention import Nystromformer

recorder.seed()
model = Nystromformer(dim=16, dim_head=8, heads=2, depth=2, num_landmarks=4, pinv_iterations=4)
data = [torch.randn(32, 16, 16), torch.randint(0, 16, (32,))]
recorder.fit(model, lambda net, x, y: torch.nn.functional.cross_entropy(net(x).mean(1), y), data, batch_size=8)
