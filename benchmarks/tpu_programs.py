"""Programs for TPU pods, compiled here and counted: ``python -m benchmarks.tpu_programs [ROW …]``.

Nothing runs: libtpu compiles the training step of an unchanged transformers model for a pod that is not here, and the compiled
program is counted (:mod:`xlatrain.preflight`). Beside the rows of Llama-3-8B stand the figures of MaxText 0.2.5's
``train_compile`` with the same jax 0.10.2 and libtpu 0.0.42.1. A row of the whole depth takes minutes and gigabytes to compile;
``--layers 4`` compiles fewer of them: depth is a loop, so that what a layer takes can be read off two depths.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for _name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
    os.environ.setdefault(_name, "1")

import torch  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from torch_compat import LightningModule, Trainer  # noqa: E402
from torch_compat.strategies import MeshStrategy  # noqa: E402
from xlatrain.mesh.mesh import DATA_AXES  # noqa: E402

_LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}


@dataclass(frozen=True)
class Program:
    """A step to compile.

    Attributes:
        family: of transformers: ``"Llama"``, ``"Mistral"``, ….
        config: of the model.
        length: tokens of a row.
        rows: of the whole mesh.
        topology: as preflight names it: of a slice.
        axes: of the mesh; empty: all chips are ``fsdp``.
        beside: figures of MaxText, by the names of ours.
        slices: of the topology, joined by the data-center network.
    """

    family: str
    config: dict[str, Any]
    length: int
    rows: int
    topology: str
    axes: dict[str, int] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    slices: int = 1


_MIXTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
_LLAMA_405B = {
    **_LLAMA_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}
_405B_AXES = {"data": 8, "fsdp": 128, "tensor": 4}
_MAXTEXT = {"temporaries_gb": 5.46, "hbm_traffic_gb": 260.0, "compiler_seconds": 1.77, "mfu_bound": 0.46}
PROGRAMS = {
    "llama-8b-4k": Program("Llama", _LLAMA_8B, 4096, 256, "v5e:16x16", beside=_MAXTEXT),
    "llama-8b-4k-2-layers": Program("Llama", {**_LLAMA_8B, "num_hidden_layers": 2}, 4096, 256, "v5e:16x16"),
    "llama-8b-32k": Program("Llama", _LLAMA_8B, 32768, 64, "v5p:4x4x4"),
    "llama-8b-32k-context": Program("Llama", _LLAMA_8B, 32768, 16, "v5p:4x4x4", {"fsdp": 16, "context": 4}),
    "llama-8b-128k-context": Program("Llama", _LLAMA_8B, 131072, 16, "v5p:4x4x4", {"fsdp": 16, "context": 4}),
    "mistral-7b-8k-window": Program("Mistral", {**_LLAMA_8B, "vocab_size": 32000, "sliding_window": 4096}, 8192, 64, "v5p:4x4x4"),
    "mixtral-8x7b-4k": Program("Mixtral", _MIXTRAL, 4096, 64, "v5p:4x4x4"),
    "mixtral-8x7b-4k-expert": Program("Mixtral", _MIXTRAL, 4096, 64, "v5p:4x4x4", {"fsdp": 8, "expert": 8}),
    "llama-405b-8k": Program("Llama", _LLAMA_405B, 8192, 1024, "v5p:8x8x8", _405B_AXES, slices=8),
}


class Tokens(Dataset[torch.Tensor]):
    """Rows of one token id."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows, self._length = rows, length

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(self._length, dtype=torch.long)


class Causal(LightningModule):
    """A causal language model as its users train it: recomputed layers, AdamW."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.model: Any = None

    def configure_model(self) -> None:
        import transformers

        if self.model is not None:
            return
        config = getattr(transformers, f"{self.program.family}Config")(**self.program.config)
        config.use_cache = False
        self.model = getattr(transformers, f"{self.program.family}ForCausalLM")(config)
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def report_of(program: Program, output: str | None = None) -> Any:
    """What preflight says of it."""
    os.environ.setdefault("XLATRAIN_ROLL_LAYERS", "3")
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy = MeshStrategy(program.axes) if program.axes else "fsdp"
    trainer = Trainer(strategy=strategy, precision="bf16-mixed", max_steps=1, limit_val_batches=0, **quiet)
    chips = program.slices * math.prod(int(n) for n in program.topology.split(":")[1].split("x"))
    parts = math.prod(program.axes.get(axis, 1) for axis in DATA_AXES) if program.axes else chips
    loader = DataLoader(Tokens(program.rows, program.length), batch_size=program.rows // parts)
    return trainer.preflight(
        Causal(program),
        loader,
        topology=program.topology,
        num_slices=program.slices,
        suggest=False,
        evaluation=False,
        output=output,
        progress=_progress,
    )


def _progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_programs", description=__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--output", help="folder for the reports")
    parser.add_argument("--layers", type=int, help="compile so many layers instead of all")
    args = parser.parse_args()
    if unknown := set(args.rows) - set(PROGRAMS):
        parser.error(f"unknown rows {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    for name in args.rows or PROGRAMS:
        start = time.perf_counter()
        program = PROGRAMS[name]
        if args.layers is not None:
            program = replace(program, config={**program.config, "num_hidden_layers": args.layers})
        report = report_of(program, None if args.output is None else os.path.join(args.output, name))
        print(f"== {name}: {time.perf_counter() - start:.0f} s")
        print(report)
        if program.beside and args.layers is None:
            print(f"MaxText 0.2.5: {json.dumps(program.beside)}")


if __name__ == "__main__":
    main()
