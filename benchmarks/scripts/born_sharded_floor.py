"""A process of ``benchmarks.born_sharded --floor``: the same model and steps written by hand in JAX, with nothing of ours.

A Llama of the shapes of ``born_sharded.py``, parameters stacked by layer and born on their shards under ``jit``, layers under
``lax.scan``, ``fsdp`` by ``NamedSharding`` and one constraint on the activations, SGD: what a JAX engineer would write first.
What it takes above its shards is XLA's. ``--compile-only`` prints ``memory_analysis()`` of a step instead of running it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from typing import Any

from benchmarks.scripts.born_sharded import cpu_seconds, peak_bytes

Params = dict[str, Any]


def shapes(args: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """By name; those with "layers." have the layer as their first dim."""
    hidden, middle, kv = args.hidden, args.hidden * 11 // 4, args.hidden // 512 * 64
    layer = {
        "q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden), "gate": (middle, hidden),
        "up": (middle, hidden), "down": (hidden, middle), "norm_attention": (hidden,), "norm_mlp": (hidden,),
    }  # fmt: skip
    stacked = {f"layers.{name}": (args.layers, *shape) for name, shape in layer.items()}
    return {"embedding": (32000, hidden), **stacked, "norm": (hidden,), "head": (32000, hidden)}


def forward(params: Params, tokens: Any, heads: int, whole: Any, rows: Any) -> Any:
    """The mean cross entropy of the next token."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, weight: Any) -> Any:
        y = x.astype(jnp.float32)
        return weight * (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def split(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:-1], count, -1)

    def rotated(x: Any) -> Any:
        half = x.shape[-1] // 2
        angle = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        cos, sin = (f(angle).astype(x.dtype)[:, None] for f in (jnp.cos, jnp.sin))
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x: Any, w: Params) -> tuple[Any, None]:
        y = norm(x, w["norm_attention"])
        kv_heads = w["k"].shape[0] // (w["q"].shape[0] // heads)
        q, k, v = split(y @ w["q"].T, heads), split(y @ w["k"].T, kv_heads), split(y @ w["v"].T, kv_heads)
        found = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + found.reshape(x.shape) @ w["o"].T
        y = norm(x, w["norm_mlp"])
        x = x + (jax.nn.silu(y @ w["gate"].T) * (y @ w["up"].T)) @ w["down"].T
        return jax.lax.with_sharding_constraint(x, rows), None

    table = jax.lax.with_sharding_constraint(params["embedding"], whole)
    x = jax.lax.with_sharding_constraint(table[tokens], rows)
    layers = {name.removeprefix("layers."): value for name, value in params.items() if name.startswith("layers.")}
    x, _ = jax.lax.scan(layer, x, layers)
    logits = (norm(x, params["norm"]) @ params["head"].T).astype(jnp.float32)[:, :-1]
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - picked).mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-true"])
    parser.add_argument("--ordered", action="store_true", help="with XLA:CPU's order for memory, as our steps are compiled")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    if args.processes > 1:
        from xlatrain.cluster import distributed

        distributed.initialize()
    elif "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", args.devices)
    base, start, cpu = peak_bytes(), time.perf_counter(), cpu_seconds()
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    dtype = jnp.bfloat16 if args.precision == "bf16-true" else jnp.float32
    wanted = shapes(args)

    def place(name: str) -> NamedSharding:
        shape = wanted[name]
        first = 1 if name.startswith("layers.") else 0
        dim = max(range(first, len(shape)), key=lambda d: shape[d])
        return NamedSharding(mesh, P(*[None] * dim, "fsdp"))

    places = {name: place(name) for name in wanted}
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("fsdp"))
    loss = functools.partial(forward, heads=args.hidden // 64, whole=whole, rows=rows)
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if args.ordered else {}

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(places, whole), compiler_options=options)
    def step(params: Params, tokens: Any) -> tuple[Params, Any]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, grads), value

    batch = jax.device_count()
    if args.compile_only:
        given = {name: jax.ShapeDtypeStruct(wanted[name], dtype, sharding=places[name]) for name in wanted}
        compiled = step.lower(given, jax.ShapeDtypeStruct((batch, args.length), jnp.int32, sharding=rows)).compile()
        stats = compiled.memory_analysis()
        print(f"arguments {stats.argument_size_in_bytes:,} temporaries {stats.temp_size_in_bytes:,} bytes per device")
        return
    params = {}
    for i, (name, shape) in enumerate(wanted.items()):  # one program each: a whole one would need more at its peak
        make = jax.jit(lambda key, shape=shape: 0.02 * jax.random.normal(key, shape, dtype), out_shardings=places[name])
        params[name] = jax.block_until_ready(make(jax.random.key(i)))
    made = {"seconds": time.perf_counter() - start, "cpu": cpu_seconds() - cpu, "peak_init": peak_bytes()}
    shards = sum(shard.data.nbytes for array in params.values() for shard in array.addressable_shards)
    tokens = np.random.default_rng(0).integers(32000, size=(batch, args.length), dtype=np.int32)
    placed = jax.make_array_from_callback(tokens.shape, rows, lambda index: tokens[index])
    for _ in range(args.steps):
        params, value = step(params, placed)
        jax.block_until_ready(value)
    count = sum(array.size for array in params.values())
    print(
        "measured " + json.dumps({"peak": peak_bytes(), "base": base, "shards": shards, "parameters": count, **made}), flush=True
    )


if __name__ == "__main__":
    main()
