"""A process of :mod:`benchmarks.born_sharded`: a Llama made by stock torch, or on the shards of a mesh, or compiled only.

Prints one JSON line: seconds from the first line of the constructor to the last parameter in place, peak resident memory, bytes
of shards here, of the parameters among them (gradients take as much), and of the largest parameter, unsharded.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

os.environ["XLATRAIN_HOST_MEMORY"] = "0"  # nothing whole on the host, during the run or after it


def llama(args: argparse.Namespace) -> LlamaForCausalLM:
    """TinyLlama's shape with 22 layers: 1.1e9 parameters, 201 tensors."""
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=args.hidden, intermediate_size=args.hidden * 11 // 4, num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 64, num_key_value_heads=max(1, args.hidden // 512), vocab_size=32000,
            max_position_embeddings=128, use_cache=False,
        )
    )  # fmt: skip


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    """Processor time of all threads: what the same work would take on one otherwise idle core."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def report(**measured: Any) -> None:
    print("measured " + json.dumps({"peak": peak_bytes(), **measured}), flush=True)


def stock(args: argparse.Namespace) -> None:
    base, start, cpu = peak_bytes(), time.perf_counter(), cpu_seconds()
    model = llama(args)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    size = sum(p.nbytes for p in model.parameters())
    report(base=base, seconds=seconds, cpu=cpu, shards=size, parameters=sum(p.numel() for p in model.parameters()))


def parts_of(args: argparse.Namespace) -> tuple[Any, Any, DataLoader]:
    """The LightningModule, which notes what making it took, the Trainer and the loader."""
    import jax

    from torch_compat import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama: Any = None

        def configure_model(self) -> None:
            if self.llama is None:
                self.base, self.start, self.cpu = peak_bytes(), time.perf_counter(), cpu_seconds()
                self.llama = llama(args)

        def on_fit_start(self) -> None:
            if args.how == "temporaries":
                return
            placed = self.trainer.strategy.placed
            params = [*placed.state.params.values()]
            arrays = [*params, *placed.state.buffers.values()]
            jax.block_until_ready(arrays)
            self.measured = {
                "base": self.base,
                "seconds": time.perf_counter() - self.start,
                "cpu": cpu_seconds() - self.cpu,
                "shards": sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards),
                "gradients": sum(shard.data.nbytes for array in params for shard in array.addressable_shards),
                "largest": max(array.nbytes for array in params),
                "parameters": sum(array.size for array in params),
                "peak_init": peak_bytes(),
            }

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.llama(input_ids=batch[0], labels=batch[0]).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = Trainer(
        accelerator="cpu", devices=args.devices, num_nodes=args.processes, strategy="fsdp", max_steps=args.steps, logger=False,
        precision=args.precision, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    tokens = torch.randint(32000, (64, args.length), generator=torch.Generator().manual_seed(0))
    return Module(), trainer, DataLoader(TensorDataset(tokens), batch_size=1)


def born(args: argparse.Namespace) -> None:
    from torch_compat import seed_everything

    seed_everything(0)
    module, trainer, loader = parts_of(args)
    trainer.fit(module, loader)
    report(**module.measured)


def temporaries(args: argparse.Namespace) -> None:
    """Bytes that a step takes on each device beside its arguments, by ``memory_analysis()``; nothing is made or run."""
    from torch_compat.preflight.finder import find_steps

    module, trainer, loader = parts_of(args)
    (step,) = find_steps(trainer, module, loader, None, None, evaluation=False).steps
    compiled = step.program.lower(*step.args).compile()
    report(temporaries=compiled.memory_analysis().temp_size_in_bytes)


MODES = {"stock": stock, "born": born, "temporaries": temporaries}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=list(MODES))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    MODES[args.how](args)


if __name__ == "__main__":
    main()
