"""Between processes collectives are told apart by their order: none follows a loop with others inside without waiting for it.

The programs are compiled for the devices of one process, and looked at. What training on several processes gives is in
``tests/multiprocess``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torch_compat import LightningModule, Trainer
from torch_compat.preflight.finder import find_steps
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.engine import Engine
from xlatrain.xla.compiler_options import LARGE, compiler_options
from xlatrain.xla.passes import apply as rewriting
from xlatrain.xla.passes.apply import apply_jaxpr_passes

pytestmark = pytest.mark.usefixtures("compiled_as_for_users")

LAYERS, WIDTH, WORDS, ROWS = 3, 64, 6144, 32  # tables of 1.5 MB: whole, they are worth waiting
COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"}


def beside_loops(text: str) -> list[tuple[str, str]]:
    """In a compiled program's text, in its order: loops, and collectives after them that need nothing of what they give."""
    computations = {found[1]: found[2] for found in re.finditer(r"^(?:ENTRY )?%([\w.-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)}
    each = {name: [_instruction(line) for line in body.splitlines()] for name, body in computations.items()}

    def communicates(name: str) -> bool:
        return any(kind in COLLECTIVES or any(map(communicates, inner)) for _, kind, _, inner in each[name])

    found = []
    for instructions in each.values():
        needs: dict[str, set[str]] = {}
        running: list[str] = []
        for name, kind, operands, inner in instructions:
            needs[name] = set(operands).union(*(needs.get(operand, set()) for operand in operands))
            is_loop = kind not in COLLECTIVES and any(map(communicates, inner))
            if is_loop or kind in COLLECTIVES:
                found += [(loop, name) for loop in running if loop not in needs[name]]
                running = [loop for loop in running if loop not in needs[name]] + [name] * is_loop
    return found


def _instruction(line: str) -> tuple[str, str, list[str], list[str]]:
    """The name of an instruction, its kind, its operands, and the computations that it calls."""
    found = re.match(r"\s+(?:ROOT )?%([\w.-]+) = .*?\s([a-z][a-z-]*)\((.*)", line)
    if found is None:
        return "", "", [], []
    name, kind, rest = found.groups()
    operands, _, attributes = rest.partition(")")
    while operands.count("(") >= operands.count(")") + 1 and ")" in attributes:  # types of operands may be tuples
        more, _, attributes = attributes.partition(")")
        operands += ")" + more
    inner = re.findall(r"(?:calls|body|condition|to_apply)=%([\w.-]+)", attributes)
    branches = re.search(r"branch_computations=\{([^}]*)\}", attributes)
    return name, kind, re.findall(r"%([\w.-]+)", operands), inner + re.findall(r"%([\w.-]+)", branches[1] if branches else "")


def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]


def attention(x: jax.Array, stack: jax.Array) -> jax.Array:
    """A loop in a loop, and a product after the inner one."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        inner, _ = lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=2)
        return x + inner @ w.T, None

    return lax.scan(layer, x, stack)[0]


def repeated(x: jax.Array, stack: jax.Array) -> jax.Array:
    """Loops without and with a known end, which need nothing of each other, in a function that is jitted, and a branch."""
    first = jax.jit(lambda x, w: lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ w), x))(x, stack[0])
    second = lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ stack[1]), x)
    third = lax.cond(x[0, 0] > 9, lambda: x @ stack[2], lambda: x @ stack[2].T)
    return first + second + third


def step_of(function: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """A training step: a table, layers, a head, clipping by norm."""

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        x = function(params["table"][tokens], params["stack"]) * params["scale"]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x @ params["head"].T), tokens[:, None], 1)
        return -chosen.mean()

    def step(params: dict[str, jax.Array], tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        norm = optax.tree.norm(grads)
        return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), value

    return step


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh({"fsdp": 4}, devices=jax.devices()[:4])


@pytest.fixture
def as_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "needs_order", lambda mesh: True)


@pytest.mark.parametrize("function", [layers, attention, repeated])
@pytest.mark.usefixtures("as_between_processes")
def test_every_collective_waits_for_the_loop_before_it(function: Callable[..., Any], mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    shapes = {"table": (WORDS, WIDTH), "stack": (LAYERS, WIDTH, WIDTH), "scale": (WIDTH,), "head": (WORDS, WIDTH)}
    specs = {"table": ("fsdp",), "stack": (None, "fsdp"), "scale": ("fsdp",), "head": ("fsdp",)}
    shardings = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    params = {name: rng.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    placed = jax.device_put(params, shardings)
    tokens = jax.device_put(rng.integers(0, WORDS, ROWS), NamedSharding(mesh, PartitionSpec("fsdp")))
    step, options = step_of(function), compiler_options(mesh, LARGE)

    def compiled(step: Callable[..., Any]) -> Any:
        return jax.jit(step, out_shardings=(shardings, None)).lower(placed, tokens).compile(options)

    plain, ordered = compiled(step), compiled(apply_jaxpr_passes(step, lambda params: shardings))
    assert beside_loops(plain.as_text())  # if XLA waits for loops one day, xlatrain/xla/passes/ordering.py can go
    assert beside_loops(ordered.as_text()) == []
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-7)
    jax.tree.map(close, ordered(placed, tokens)[0], plain(placed, tokens)[0])
    before, after = (one.memory_analysis().temp_size_in_bytes for one in (plain, ordered))
    assert after < 1.1 * before


def whole(x: jax.Array) -> jax.Array:
    return lax.with_sharding_constraint(x, PartitionSpec())


def counted(x: jax.Array, stack: jax.Array, head: jax.Array) -> Any:
    """Gathers before and after a loop that begins with a number of which the compiler knows."""
    gathered = whole(head * 2).sum()
    return lax.fori_loop(0, 3, lambda i, n: n + jnp.int32(whole(stack[i]).sum()), 0), gathered, whole(head)


def from_zeros(x: jax.Array, stack: jax.Array, head: jax.Array) -> Any:
    """A loop that begins with zeros, behind a gather."""
    gathered = whole(head * 2).sum()
    return lax.scan(lambda y, w: (y + whole(w)[:1], None), jnp.zeros((1, WIDTH)), stack)[0], gathered


def branched(x: jax.Array, stack: jax.Array, head: jax.Array) -> Any:
    return lax.cond(x[0, 0] > 9, lambda: whole(stack).sum(), lambda: 0.0), whole(head)


def unfed(x: jax.Array, stack: jax.Array, head: jax.Array) -> Any:
    """A loop that carries nothing."""
    return lax.scan(lambda nothing, _: (nothing, whole(stack[0]).sum()), None, None, length=3)[1], whole(head)


def with_keys(x: jax.Array, stack: jax.Array, head: jax.Array) -> Any:
    """A loop that carries a random key alone."""
    gathered = whole(head * 2).sum()
    key, _ = lax.scan(lambda k, w: (jax.random.fold_in(k, jnp.int32(whole(w).sum())), None), jax.random.key(0), stack)
    return jax.random.uniform(key), gathered, whole(head)


@pytest.mark.parametrize("function", [counted, from_zeros, branched, unfed, with_keys])
@pytest.mark.usefixtures("as_between_processes")
def test_loops_with_little_to_wait_for(function: Callable[..., Any], mesh: Mesh) -> None:
    """And gathers that the program itself asks for."""
    rng = np.random.default_rng(0)
    shapes = {"stack": (LAYERS, WIDTH, WIDTH), "head": (WORDS, WIDTH)}
    shardings = {name: NamedSharding(mesh, PartitionSpec(*[None] * (len(shape) - 2), "fsdp")) for name, shape in shapes.items()}
    exact = {name: rng.integers(0, 3, shape).astype(np.float32) for name, shape in shapes.items()}  # sums in any order
    params = jax.device_put(exact, shardings)
    x = jax.device_put(np.ones((ROWS, WIDTH), np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))

    def call(params: dict[str, jax.Array], x: jax.Array) -> Any:
        return function(x, params["stack"], params["head"])

    with jax.set_mesh(mesh):
        programs = [
            jax.jit(one).lower(params, x).compile(compiler_options(mesh, LARGE))
            for one in (apply_jaxpr_passes(call, lambda params: shardings), call)
        ]
    assert beside_loops(programs[0].as_text()) == []
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), *(program(params, x) for program in programs))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stack = nnx.Param(jax.random.normal(rngs.params(), (LAYERS, WIDTH, WIDTH)) / 8)
        self.head = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(layers(x, self.stack[...]))


@pytest.mark.usefixtures("as_between_processes")
def test_in_the_flax_engine(mesh: Mesh) -> None:
    rules = ShardingRules(by_path=(("*kernel", PartitionSpec("fsdp")), ("stack", PartitionSpec(None, "fsdp"))))
    engine = Engine(Net, optax.sgd(0.1), mesh=mesh, rules=rules)
    (batch,) = engine.place([np.ones((ROWS, WIDTH), np.float32)])
    program = engine.train_program(lambda net, x: jnp.square(net(x)).mean(), batch.tree)
    with jax.set_mesh(mesh):
        text = program.lower(engine.init(), batch.tree, (), ()).compile().as_text()
    assert "while" in text
    assert beside_loops(text) == []


class Deep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x = self.table(batch[0])
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return torch.nn.functional.cross_entropy(self.head(self.norm(x)), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("is_ordered", [True, False])
def test_in_a_trainers_step_over_repeated_layers(is_ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "needs_order", lambda mesh: is_ordered)
    monkeypatch.setenv("XLATRAIN_ROLL_LAYERS", "3")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(ROWS)), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", devices=4, strategy="fsdp", max_steps=1, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (step,) = find_steps(trainer, Deep(), loader, None, None, evaluation=False).steps
    text = step.program.lower(*step.args).compile().as_text()
    assert "while" in text
    assert bool(beside_loops(text)) is not is_ordered
