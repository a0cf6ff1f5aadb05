"""The generator of initial values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import stats

from xlatrain.init.prng import INIT_PRNG, _radius, _sine, standard_normal, threefry_2x32
from xlatrain.mesh.mesh import make_mesh


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


def test_normal_numbers_are_normal_tails_included() -> None:
    draw = lambda key: standard_normal(key, (4000, 2504))  # noqa: E731
    key = jax.random.key(5, impl=INIT_PRNG)
    values = np.asarray(jax.jit(draw)(key))
    edges = np.concatenate([[-np.inf], np.linspace(-4.8, 4.8, 97), [np.inf]])  # 8 expected beyond each end
    expected = np.diff(stats.norm.cdf(edges)) * values.size
    assert stats.chisquare(np.histogram(values, edges)[0], expected * (values.size / expected.sum())).pvalue > 1e-3
    around_zero = values[np.abs(values) < 1e-2]
    assert stats.kstest(around_zero, "uniform", (-1e-2, 2e-2)).pvalue > 1e-3
    wide = values.astype(np.float64)
    for shifted in ((wide[1:], wide[:-1]), (wide[:, 1:], wide[:, :-1])):  # neighbours, their sizes too
        for one, other in (shifted, map(np.abs, shifted)):
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.0015
    split = NamedSharding(make_mesh({"fsdp": 8}), PartitionSpec(None, "fsdp"))
    np.testing.assert_array_equal(np.asarray(jax.jit(draw, out_shardings=split)(key)), values)


def test_normal_numbers_are_those_of_box_and_muller() -> None:
    key = jax.random.key(0, impl=INIT_PRNG)
    words = threefry_2x32(jax.random.key_data(key), jnp.uint32(0), jnp.arange(10000, dtype="uint32"))
    first, second = (np.asarray(word) for word in words)
    uniform = ((first >> 1).astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**31
    radius = np.sqrt(-2 * np.log(uniform))
    expected = radius * np.sin(np.pi / 2 * second.astype(np.int32) / 2**31)
    np.testing.assert_allclose(np.asarray(standard_normal(key, (10000,))), expected, rtol=1e-6, atol=1e-7)
    assert standard_normal(key, ()).shape == () and standard_normal(key, (0, 3)).shape == (0, 3)


def test_the_extremes_are_finite() -> None:
    words = jnp.asarray([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF], jnp.uint32)
    radius, sine = np.asarray(_radius(words)), np.asarray(_sine(words))
    assert radius[0] == radius[1] == np.float32(np.sqrt(64 * np.log(2))) and 0 <= radius[-1] < 1e-3 and radius[2] >= radius[3]
    np.testing.assert_allclose(sine, np.sin(np.pi / 2 * np.asarray(words).astype(np.int32) / 2**31), rtol=1e-6)
    assert np.abs(sine).max() <= 1
