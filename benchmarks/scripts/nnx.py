"""Processor time of steps of an nnx GPT and of a tiny module, by the Trainer and by a loop written by hand.

``python -m benchmarks.scripts.nnx``. Both run in one process, in turn, on the same batches.
The time of all threads counts, so that other work on the machine does not.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import torch_compat
import xlatrain

torch_compat.install()
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import nnx_gpt  # noqa: E402


class Tiny(xlatrain.JaxModule):
    def __init__(self) -> None:
        self.layer = nnx.Linear(8, 1, rngs=nnx.Rngs(0))

    def loss(self, batch: Any) -> jax.Array:
        x, y = batch
        return ((self.layer(x) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


class GPT(nnx_gpt.GPT):
    def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


class Batches:
    def __init__(self, batch: Any, count: int) -> None:
        self._batch = batch
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter([self._batch] * self._count)


class Clock(torch_compat.Callback):
    """Seconds of processor time between the batches ``first`` and the last."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (self._first, self._last):
            jax.block_until_ready(trainer.strategy.placed.raw_state.params)
            self.seconds = time.process_time() - self.seconds


def by_trainer(make: Callable[[], Any], batch: Any, steps: int) -> float:
    clock = Clock(20, 20 + steps)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = torch_compat.Trainer(accelerator="cpu", devices=1, max_steps=21 + steps, callbacks=[clock], **quiet)
    trainer.fit(make(), Batches(batch, 21 + steps))
    return clock.seconds / steps


def by_hand(make: Callable[[], Any], batch: Any, steps: int) -> float:
    module = make()
    graphdef, params, others = nnx.split(module, nnx.Param, ...)
    transformation = module.configure_optimizers()
    state = transformation.init(params)

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p, others).loss(batch))(params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    program = jax.jit(step, donate_argnums=(0, 1))
    for count in range(20 + steps):
        if count == 20:
            jax.block_until_ready(params)
            start = time.process_time()
        params, state, _ = program(params, state, jax.tree.map(jnp.asarray, batch))
    jax.block_until_ready(params)
    return (time.process_time() - start) / steps


def main(rounds: int = 5) -> None:
    draw = np.random.default_rng(0)
    tiny = (draw.normal(size=(32, 8)).astype(np.float32), draw.normal(size=(32, 1)).astype(np.float32))
    tokens = draw.integers(0, 256, (8, 129)).astype(np.int32)
    for name, make, batch, steps in (("tiny", Tiny, tiny, 1000), ("GPT", GPT, (tokens[:, :-1], tokens[:, 1:]), 20)):
        pairs = [(by_trainer(make, batch, steps), by_hand(make, batch, steps)) for _ in range(rounds)]
        ours, theirs = (min(one) for one in zip(*pairs, strict=True))
        ratio = float(np.median([a / b for a, b in pairs]))
        print(f"{name}: {ours * 1e6:.0f} µs a step by the Trainer, {theirs * 1e6:.0f} by hand, ratio {ratio:.3f}, "
              f"difference {(ours - theirs) * 1e6:.0f} µs", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
