"""transformers: Mixtral, two of four experts a token, with the loss of its router."""

import recorder
import torch
from transformers import MixtralConfig, MixtralForCausalLM

recorder.seed()
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 32}
net = MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True))
recorder.fit(net, lambda net, x: net(input_ids=x, labels=x).loss, [torch.randint(0, 64, (32, 12))], batch_size=8)
