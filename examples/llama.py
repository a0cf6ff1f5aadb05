"""A Llama of `transformers`, born on the shards of an eight-device mesh.

    python -m torch_compat examples/llama.py             # 2.9 million parameters, a few seconds
    python -m torch_compat examples/llama.py --size 1b   # 1.04e9 parameters in bfloat16: 11.2 GB of memory, minutes

``configure_model`` runs without values; each parameter is then computed by the devices that hold its shards. With
``XLATRAIN_HOST_MEMORY=0`` nothing is put together on the host after the run either.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
ONE_BILLION = {
    "vocab_size": 4096, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 42, "num_attention_heads": 24,
    "num_key_value_heads": 4,
}  # fmt: skip


class Llama(pl.LightningModule):
    def __init__(self, shape, optimizer, lr):
        super().__init__()
        self.save_hyperparameters()
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.model = LlamaForCausalLM(LlamaConfig(**self.hparams.shape))

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return getattr(torch.optim, self.hparams.optimizer)(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["tiny", "1b"], default="tiny")
    parser.add_argument("--devices", type=int, default=8)
    args = parser.parse_args()
    pl.seed_everything(0)
    if args.size == "tiny":
        model, precision = Llama(TINY, "AdamW", 1e-3), "32-true"
    else:  # SGD: AdamW's state would be two copies of the parameters
        model, precision = Llama(ONE_BILLION, "SGD", 0.1), "bf16-true"
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=args.devices, strategy="fsdp", precision=precision, log_every_n_steps=1
    )
    tokens = torch.randint(model.hparams.shape["vocab_size"], (4 * args.devices, 32))
    trainer.fit(model, DataLoader(tokens, batch_size=1))
    print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
