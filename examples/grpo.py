"""GRPO of a GPT-2 of `transformers`: generate, score and step in one LightningModule, one program on an eight-device mesh.

    python -m torch_compat examples/grpo.py
    python examples/grpo.py --devices 1

Answers to a prompt compete with each other: what is better than their mean becomes likelier. The reward here is the share of even
tokens, which a model learns in seconds; put a reward model, or any function of tensors, in its place.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

SHAPE = {"vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
PROMPT, NEW = 4, 8


class GRPO(pl.LightningModule):
    def __init__(self, answers=8, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.model = GPT2LMHeadModel(GPT2Config(**SHAPE, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=0))

    def reward(self, answers):
        """The share of even tokens: float32[rows], of int64[rows, tokens]."""
        return (answers % 2 == 0).float().mean(dim=1)

    def training_step(self, prompts, batch_idx):
        tokens = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW,
            do_sample=True,
            top_k=0,
            num_return_sequences=self.hparams.answers,
        )
        reward = self.reward(tokens[:, PROMPT:])
        groups = reward.view(-1, self.hparams.answers)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        logits = self.model(tokens).logits[:, PROMPT - 1 : -1]
        chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, PROMPT:, None])[..., 0]
        loss = -(advantage * chosen).mean()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("reward", reward.mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    pl.seed_everything(0)
    trainer = pl.Trainer(max_steps=args.steps, accelerator="cpu", devices=args.devices, logger=False, enable_checkpointing=False)
    prompts = torch.randint(1, SHAPE["vocab_size"], (16 * args.steps, PROMPT))
    trainer.fit(GRPO(), DataLoader(prompts, batch_size=16 // args.devices))
    print(f"{trainer.global_step} steps, reward {trainer.callback_metrics['reward']:.3f}")


if __name__ == "__main__":
    main()
