"""The flax engine against a plain optax loop on one device, on meshes, with every option."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from xlatrain import checkpoint
from xlatrain.mesh.mesh import make_mesh
from xlatrain.mesh.sharding import ShardingRules
from xlatrain.step.engine import Engine

ROOT = Path(checkpoint.__file__).parents[2]
N_STEPS = 5


class Classifier(nnx.Module):
    """Has what is awkward: batch statistics, dropout's random streams, tied weights, an annotated sharding."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.embed = nnx.Embed(32, 64, rngs=rngs)
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))
        self.hidden = nnx.Linear(64, 64, kernel_init=split, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.tied = self.embed

    def __call__(self, tokens):
        x = self.norm(nnx.relu(self.hidden(self.embed(tokens).mean(1))))
        return self.tied.attend(self.dropout(x))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def batches(n: int = N_STEPS, size: int = 32) -> list[dict]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (n, size, 6)).astype(np.int32)
    return [{"tokens": rows, "label": rows[:, 0]} for rows in tokens]


def one_device():
    return make_mesh({"data": 1, "fsdp": 1}, devices=jax.devices()[:1])


def on_one_device(make_module):
    with jax.set_mesh(one_device()):  # flax wants a mesh wherever a parameter is annotated
        return make_module(nnx.Rngs(0))


def plain_loop(make_module, optimizer, data, loss_fn=loss_fn, accumulate: int = 1):
    """The loop that a JAX user writes by hand for one device; microbatches as the engine documents them."""
    model = on_one_device(make_module)
    opt_state = optimizer.init(nnx.state(model, nnx.Param))
    gradients = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))
    losses = []
    for batch in data:
        total, loss = None, 0.0
        for i in range(accumulate):
            (part, _), grads = gradients(model, jax.tree.map(lambda leaf, i=i: leaf[i::accumulate], batch))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            loss += float(part) / accumulate
        params = nnx.state(model, nnx.Param)
        updates, opt_state = optimizer.update(jax.tree.map(lambda grad: grad / accumulate, total), opt_state, params)
        nnx.update(model, optax.apply_updates(params, updates))
        losses.append(loss)
    return losses, model


def run(engine: Engine, state, data, loss_fn=loss_fn, step=None):
    step = step or engine.compile_train_step(loss_fn)
    losses = []
    for batch in engine.place(data):
        state, output = step(state, batch)
        losses.append(float(output.loss))
    return state, losses


def flat(module) -> dict[str, np.ndarray]:
    state = nnx.state(module, nnx.Any(nnx.Param, nnx.BatchStat))
    return {".".join(map(str, path)): np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(state)}


def assert_same(module, reference) -> None:
    values, expected = flat(module), flat(reference)
    assert values.keys() == expected.keys()
    for name in values:
        np.testing.assert_allclose(values[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("axes", "accumulate"), [({"data": 8, "fsdp": 1}, 2), ({"data": 2, "fsdp": 4}, 1), ({"data": 2, "fsdp": 2, "tensor": 2}, 2)]
)
def test_matches_a_plain_loop_on_one_device(axes, accumulate):
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    expected, reference = plain_loop(Classifier, clipped, batches(), accumulate=accumulate)
    engine = Engine(Classifier, optax.adam(1e-2), mesh=make_mesh(axes), accumulate=accumulate, clip_norm=0.5)
    state, losses = run(engine, engine.init(seed=0), batches())
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same(engine.module(state), reference)


@pytest.mark.parametrize("size", [20, 3])
def test_a_batch_that_does_not_divide_the_mesh_is_computed_exactly(size):
    expected, reference = plain_loop(Classifier, optax.sgd(0.1), batches(3, size))
    engine = Engine(Classifier, optax.sgd(0.1), mesh=make_mesh({"data": 2, "fsdp": 4}))
    state, losses = run(engine, engine.init(seed=0), batches(3, size))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert_same(engine.module(state), reference)


@pytest.mark.parametrize("size", [16, 6])
def test_leaves_that_are_not_rows_go_to_every_microbatch_whole(size):
    """A scalar, and a table that is (for 6 rows) as long as a microbatch, are no rows."""
    seen = {}

    def loss_fn(model, batch):
        seen.update(jax.tree.map(jnp.shape, batch))
        return ((model(batch["x"]) * batch["scale"] - batch["table"].sum()) ** 2).mean()

    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((size, 4)).astype(np.float32), "scale": np.float32(2), "table": np.ones(3, np.float32)}
    engine = Engine(lambda rngs: nnx.Linear(4, 2, rngs=rngs), optax.sgd(0.1), mesh=make_mesh({"data": 8}), accumulate=2)
    whole = Engine(lambda rngs: nnx.Linear(4, 2, rngs=rngs), optax.sgd(0.1), mesh=make_mesh({"data": 8}))
    _, losses = run(engine, engine.init(), [batch], loss_fn)
    assert seen == {"x": (size // 2, 4), "scale": (), "table": (3,)}
    np.testing.assert_allclose(losses, run(whole, whole.init(), [batch], loss_fn)[1], rtol=1e-5)


def test_dropout_draws_anew_each_step_and_alike_on_every_mesh():
    def make(rngs):
        return Classifier(rngs, dropout=0.5)

    same_batch = batches(1) * 3
    expected, _ = plain_loop(make, optax.sgd(0.0), same_batch)
    assert len(set(expected)) == 3
    engine = Engine(make, optax.sgd(0.0), mesh=make_mesh({"data": 2, "fsdp": 4}))
    _, losses = run(engine, engine.init(seed=0), same_batch)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


class TestSharding:
    def test_parameters_and_moments_are_born_split(self):
        engine = Engine(Classifier, optax.adamw(1e-2), mesh=make_mesh({"data": 2, "fsdp": 4}))
        state = engine.init()
        specs = {name: value.sharding.spec for name, value in state.params.items()}
        assert specs["embed.embedding"] == PartitionSpec(None, "fsdp")  # the rule: the largest dim
        assert specs["hidden.kernel"] == PartitionSpec(None, "fsdp")  # its annotation
        assert specs["hidden.bias"] == PartitionSpec()  # small
        moments = state.opt_state[0].mu
        assert {name: value.sharding.spec for name, value in moments.items()} == specs
        assert state.params["embed.embedding"].addressable_shards[0].data.shape == (32, 16)

    def test_a_rule_comes_before_the_annotation(self):
        rules = ShardingRules(by_path=(("hidden.*", PartitionSpec("fsdp")),))
        engine = Engine(Classifier, optax.sgd(0.1), mesh=make_mesh({"data": 2, "fsdp": 4}), rules=rules)
        assert engine.init().params["hidden.kernel"].sharding.spec == PartitionSpec("fsdp")

    def test_shardings_last(self):
        engine = Engine(Classifier, optax.adamw(1e-2), mesh=make_mesh({"data": 2, "fsdp": 4}))
        state, _ = run(engine, engine.init(), batches(2))
        expected = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state)
        for (path, leaf), sharding in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(expected), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), jax.tree_util.keystr(path)

    def test_values_do_not_depend_on_the_mesh(self):
        eight = Engine(Classifier, optax.sgd(0.1), mesh=make_mesh({"data": 2, "fsdp": 4}))
        one = Engine(Classifier, optax.sgd(0.1), mesh=one_device())
        split, whole = eight.init(seed=3).params, one.init(seed=3).params
        for name, value in whole.items():
            np.testing.assert_array_equal(split[name], value, err_msg=name)


def test_resumed_on_another_mesh_as_if_never_stopped(tmp_path):
    def engine(axes):
        return Engine(lambda rngs: Classifier(rngs, dropout=0.5), optax.adamw(1e-2), mesh=make_mesh(axes), accumulate=2)

    first = engine({"data": 2, "fsdp": 4})
    step = first.compile_train_step(loss_fn)
    _, expected = run(first, first.init(), batches(6), step=step)
    state, _ = run(first, first.init(), batches(6)[:3], step=step)
    pending = first.save(tmp_path / "a.ckpt", state, {"note": b"3"})
    run(first, state, batches(1), step=step)  # donates the state while it is being written
    pending.wait()

    second = engine({"fsdp": 8})
    restored = second.restore(tmp_path / "a.ckpt")
    _, losses = run(second, restored, batches(6)[3:])
    np.testing.assert_allclose(losses, expected[3:], rtol=1e-4)
    assert checkpoint.open_checkpoint(tmp_path / "a.ckpt").files["note"] == b"3"


def test_restoring_another_model_names_what_differs(tmp_path):
    mesh = make_mesh({"data": 2, "fsdp": 4})
    engine = Engine(Classifier, optax.sgd(0.1), mesh=mesh)
    engine.save(tmp_path / "a.ckpt", engine.init(), wait=True)
    other = Engine(lambda rngs: nnx.Linear(4, 8, rngs=rngs), optax.adam(0.1), mesh=mesh)
    with pytest.raises(checkpoint.CheckpointMismatchError) as caught:
        other.restore(tmp_path / "a.ckpt")
    assert "params/kernel" in str(caught.value) and "params/embed.embedding" in str(caught.value)
    assert "opt_state/0/mu/kernel" in str(caught.value)


def test_only_trainable_variables_change():
    model = Engine(Classifier, optax.sgd(0.5), mesh=make_mesh({"data": 8, "fsdp": 1}), trainable=nnx.PathContains("hidden"))
    state = model.init()
    before = {name: np.asarray(value) for name, value in state.buffers.items() if name == "embed.embedding"}
    assert set(state.params) == {"hidden.kernel", "hidden.bias"}
    state, _ = run(model, state, batches(2))
    np.testing.assert_array_equal(state.buffers["embed.embedding"], before["embed.embedding"])


def test_eval_step_keeps_the_state():
    engine = Engine(Classifier, optax.sgd(0.1), mesh=make_mesh({"data": 8, "fsdp": 1}))
    state = engine.init()

    def evaluate(model, batch):
        model.eval()
        return model(batch["tokens"])

    evaluate_step = engine.compile_eval_step(evaluate)
    (batch,) = batches(1, 5)
    reference = on_one_device(Classifier)
    reference.eval()
    for _ in range(2):
        np.testing.assert_allclose(evaluate_step(state, batch), reference(batch["tokens"]), rtol=1e-4, atol=1e-5)


class TestBadInput:
    @pytest.fixture
    def engine(self):
        return Engine(Classifier, optax.sgd(0.1), mesh=make_mesh({"data": 8, "fsdp": 1}), accumulate=2)

    def test_arguments(self):
        mesh = make_mesh({"data": 8, "fsdp": 1})
        with pytest.raises(ValueError, match="accumulate=0"):
            Engine(Classifier, optax.sgd(0.1), mesh=mesh, accumulate=0)
        with pytest.raises(ValueError, match="clip_norm=-1"):
            Engine(Classifier, optax.sgd(0.1), mesh=mesh, clip_norm=-1)
        with pytest.raises(ValueError, match="nothing to train"):
            Engine(Classifier, optax.sgd(0.1), mesh=mesh, trainable=nnx.LoRAParam)

    def test_loss_that_is_no_scalar(self, engine):
        with pytest.raises(TypeError, match=r"float32 of shape \(16, 32\) as the loss"):
            run(engine, engine.init(), batches(1), lambda model, batch: model(batch["tokens"]))
        with pytest.raises(TypeError, match="NoneType as the loss"):
            run(engine, engine.init(), batches(1), lambda model, batch: None)

    def test_batch_that_cannot_be_cut(self, engine):
        with pytest.raises(ValueError, match="a batch of 9 rows cannot be cut into accumulate=2"):
            run(engine, engine.init(), batches(1, 9))

    def test_aux_that_cannot_be_averaged(self, engine):
        with pytest.raises(TypeError, match=r"aux\['n'\] is int32"):
            run(engine, engine.init(), batches(1), lambda model, batch: (model(batch["tokens"]).mean(), {"n": jnp.int32(1)}))


class TestExample:
    def test_is_short(self):
        assert len((ROOT / "examples" / "flax_nnx.py").read_text().splitlines()) <= 60

    @pytest.mark.slow
    def test_learns_restores_and_never_loads_torch(self, tmp_path):
        program = """
            import json, os, sys
            from jax._src import xla_bridge
            sys.path.insert(0, "examples")
            import xlatrain, xlatrain.checkpoint, xlatrain.step.engine, flax_nnx
            assert not xla_bridge._backends, "importing started a JAX backend"
            losses = flax_nnx.main(sys.argv[1])
            torch = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "torch_compat", "lightning"))
            print(json.dumps([losses, torch, os.environ.get("TPU_SKIP_MDS_QUERY")]))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "a.ckpt")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS" and not name.startswith("TPU_")},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        losses, torch, query = json.loads(done.stdout.splitlines()[-1])
        assert torch == []
        assert query == "1"  # libtpu is installed for preflight: JAX looks for TPUs without waiting, and without its words
        assert losses[0] > 5 and max(losses[-10:]) < 3.6
        np.testing.assert_allclose(losses, self.plain_losses(), rtol=2e-3)

    @staticmethod
    def plain_losses() -> list[float]:
        sys.path.insert(0, str(ROOT / "examples"))
        try:
            import flax_nnx
        finally:
            sys.path.pop(0)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
        loss = lambda model, batch: (flax_nnx.loss_fn(model, batch), None)  # noqa: E731
        return plain_loop(flax_nnx.ByteModel, optimizer, flax_nnx.read_batches(), loss, accumulate=2)[0]
