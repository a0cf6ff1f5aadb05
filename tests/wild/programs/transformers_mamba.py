"""transformers: Mamba, a scan over states in Python."""

import recorder
import torch
from transformers import MambaConfig, MambaForCausalLM

recorder.seed()
net = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2, expand=2))
recorder.fit(net, lambda net, x: net(input_ids=x, labels=x).loss, [torch.randint(0, 64, (32, 12))], batch_size=8)
