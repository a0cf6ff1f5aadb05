"""Convolutions of our programs on CPU are not YNNPACK's, products are; seen in the compiled programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from xlatrain import cpu_libraries
from xlatrain.cpu_libraries import compiler_options
from xlatrain.mesh import make_mesh


def compiled(function: Callable[..., jax.Array], *shapes: tuple[int, ...], options: dict[str, str]) -> str:
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(function, compiler_options=options).lower(*args).compile().as_text()
    assert text is not None
    return text


def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_convolutions_are_left_to_eigen_and_products_to_ynnpack() -> None:
    options = compiler_options(make_mesh({"data": 1}, devices=jax.devices()[:1]))
    image, kernel = (32, 32, 32, 32), (3, 3, 32, 32)
    assert "ynn_fusion" in compiled(convolve, image, kernel, options={}), "YNNPACK has no convolutions here: drop the option"
    assert "ynn_fusion" not in compiled(convolve, image, kernel, options=options)
    assert "ynn_fusion" in compiled(jnp.matmul, (512, 512), (512, 512), options=options)


def test_a_flag_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    assert compiler_options(make_mesh({"data": 1}, devices=jax.devices()[:1])) == {}


def test_a_jaxlib_without_the_flag_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_libraries, "_WITHOUT_CONVOLUTIONS", {"xla_cpu_no_such_flag": "1"})
    cpu_libraries._is_known.cache_clear()
    try:
        assert compiler_options(make_mesh({"data": 1}, devices=jax.devices()[:1])) == {}
    finally:
        cpu_libraries._is_known.cache_clear()
