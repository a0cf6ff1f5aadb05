"""The generator of initial values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from xlatrain.init.prng import INIT_PRNG, threefry_2x32
from xlatrain.mesh import make_mesh


def test_the_cipher_gives_the_published_vectors() -> None:
    """Known answers of Random123 for threefry2x32 with 20 rounds."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3)
    vectors = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), pi, (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, expected in vectors:
        found = threefry_2x32(np.asarray(key, np.uint32), *(jnp.uint32(word) for word in counter))
        assert tuple(int(word) for word in found) == expected


def test_draws_are_uniform_independent_and_the_same_on_any_mesh() -> None:
    key = jax.random.key(3, impl=INIT_PRNG)
    draw = lambda key: jax.random.uniform(key, (512, 256))  # noqa: E731
    values = np.asarray(jax.jit(draw)(key))
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-3
    for shifted in (values[1:, :] - values[:-1, :], values[:, 1:] - values[:, :-1]):  # neighbours
        assert abs(np.mean(shifted**2) - 1 / 6) < 0.005
    folded = np.asarray(draw(jax.random.fold_in(key, 1)))
    assert abs(np.corrcoef(values.ravel(), folded.ravel())[0, 1]) < 0.01
    assert len(np.unique(np.asarray(jax.random.key_data(jax.random.split(key, 1000))), axis=0)) == 1000
    split = NamedSharding(make_mesh({"fsdp": 8}), PartitionSpec(None, "fsdp"))
    np.testing.assert_array_equal(np.asarray(jax.jit(draw, out_shardings=split)(key)), values)


def test_every_kind_of_draw_works() -> None:
    key = jax.random.key(0, impl=INIT_PRNG)
    assert sorted(np.asarray(jax.random.permutation(key, 50))) == list(range(50))
    assert set(np.asarray(jax.random.randint(key, (500,), -2, 3))) == {-2, -1, 0, 1, 2}
    assert abs(float(jax.random.gamma(key, 2.0, (4000,)).mean()) - 2) < 0.1
    assert jax.random.bits(key, (), jnp.uint8).shape == ()
