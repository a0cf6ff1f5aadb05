"""A Llama of `transformers`, born on the shards of an eight-device mesh: `python -m torch_compat examples/llama.py`."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(pl.LightningModule):
    def configure_model(self):
        config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8)
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


pl.seed_everything(0)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=8, strategy="fsdp")
trainer.fit(Llama(), DataLoader(torch.randint(512, (64, 32)), batch_size=2))
print(trainer.callback_metrics, trainer.global_step)
