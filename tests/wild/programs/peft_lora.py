"""peft: LoRA around a small Llama of transformers."""

import recorder
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

recorder.seed()
llama = LlamaForCausalLM(
    LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
)
model = get_peft_model(llama, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
recorder.fit(model, lambda net, x: net(input_ids=x, labels=x).loss, [torch.randint(0, 100, (64, 12))], batch_size=16)
