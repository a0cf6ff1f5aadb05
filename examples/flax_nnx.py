"""Train a byte-level model in flax.nnx on the Python standard library's source, sharded, and move it to another mesh half-way."""

import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from xlatrain.mesh.mesh import make_mesh
from xlatrain.step.engine import Engine

CONTEXT, WIDTH, BATCH, STEPS = 16, 128, 64, 60


class ByteModel(nnx.Module):  # predicts a byte from the CONTEXT bytes before it
    def __init__(self, rngs):
        self.embed = nnx.Embed(256, WIDTH // 4, rngs=rngs)
        self.hidden = nnx.Linear(CONTEXT * WIDTH // 4, 4 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(4 * WIDTH, 256, rngs=rngs)

    def __call__(self, before):
        return self.out(nnx.gelu(self.hidden(self.embed(before).reshape(len(before), -1))))


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["before"]), batch["next"]).mean()


def read_batches(seed=0):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    data = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    starts = np.random.default_rng(seed).integers(0, len(data) - CONTEXT, (STEPS, BATCH, 1))
    rows = data[starts + np.arange(CONTEXT + 1)]
    return [{"before": row[:, :-1], "next": row[:, -1]} for row in rows]


def train(engine, state, batches, losses):
    step = engine.compile_train_step(loss_fn)
    for batch in engine.place(batches):
        state, output = step(state, batch)
        losses.append(float(output.loss))
    return state


def main(path):
    jax.config.update("jax_num_cpu_devices", 8)  # has no effect on GPUs and TPUs
    batches, options = read_batches(), {"optimizer": optax.adamw(3e-3), "accumulate": 2, "clip_norm": 1.0}
    engine = Engine(ByteModel, mesh=make_mesh({"data": 2, "fsdp": -1}), **options)
    state = train(engine, engine.init(seed=0), batches[: STEPS // 2], losses := [])
    engine.save(path, state, wait=True)
    engine = Engine(ByteModel, mesh=make_mesh({"fsdp": -1}), **options)
    train(engine, engine.restore(path), batches[STEPS // 2 :], losses)
    return losses


if __name__ == "__main__":
    print("losses", *[f"{loss:.2f}" for loss in main(sys.argv[1] if len(sys.argv) > 1 else "flax_nnx.ckpt")[::10]])
