"""Digests: SHA-256 of every stored file, and of every array's values one that does not depend on the mesh.

A file's digest finds every flipped byte; a value digest says which array it was, and travels with the values: it is taken on the
devices before they are copied off, and compared, on request, after they are back on (perhaps other) devices.

The value digest is the sum of ``word[i] · weight(i)`` modulo 2³² over the array's bits as 32-bit words, twice with different
weights. A sum needs no order, so that each shard adds its part wherever it lies; odd weights make any change of one word a change
of the digest. It finds accidents. It is no protection against somebody who wants to deceive.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import lax

from xlatrain.checkpoint import filesystem

_DIRECTORY = "digests"
_CHUNK = 1 << 20  # words of a host array that are summed at once


def value_digest(value: Any) -> tuple[Any, Any]:
    """The two sums of an array; of a ``jax.Array`` they are on its devices, and not waited for.

    Args:
        value: an array of numbers; typed random keys as their bits (:func:`jax.random.key_data`). Where it spans processes, every
            process calls this in the same order.
    """
    return _of_device_array(value) if isinstance(value, jax.Array) else _of_host_array(np.asarray(value))


def device_digests(arrays: Mapping[str, jax.Array]) -> dict[str, tuple[Any, Any]]:
    """:func:`value_digest` of each; every process calls this in the same order.

    On CPU devices one is done before the next begins: of many sharded programs in flight, some devices may start one and some
    another, and XLA:CPU's sums over devices then wait for each other for ever.
    """
    digests = {}
    for name, value in arrays.items():
        digests[name] = value_digest(value)
        if len(value.sharding.device_set) > 1 and next(iter(value.sharding.device_set)).platform == "cpu":
            jax.block_until_ready(digests[name])
    return digests


def as_text(sums: tuple[Any, Any]) -> str:
    """16 hexadecimal digits; waits for the devices."""
    return "".join(f"{int(np.asarray(_here(one))):08x}" for one in sums)


def _here(scalar: Any) -> Any:
    return scalar.addressable_data(0) if isinstance(scalar, jax.Array) else scalar


@jax.jit
def _of_device_array(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    words = _words(value)
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(words.ndim)):
        index = index + lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride & 0xFFFFFFFF)
        stride *= words.shape[dim]
    return _weighted(words, index)


def _words(value: jax.Array) -> jax.Array:
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return _words(jnp.stack([value.real, value.imag], axis=-1))
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint32)
    bits = jnp.iinfo(value.dtype).bits if jnp.issubdtype(value.dtype, jnp.integer) else jnp.finfo(value.dtype).bits
    if bits == 64:
        return lax.bitcast_convert_type(value, jnp.uint32)
    return lax.bitcast_convert_type(value, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)


def _weighted(words: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    mixed = _mixed(index)
    turned = (mixed >> 11) | (mixed << 21)
    first, second = (jnp.sum(words * (weight | np.uint32(1)), dtype=jnp.uint32) for weight in (mixed, turned))
    return first, second


def _mixed(index: jax.Array) -> jax.Array:
    """Numbers that look random: a multiplication and the end of MurmurHash3's finalizer."""
    mixed = (index ^ (index >> 16)) * np.uint32(0x85EBCA6B)
    return mixed ^ (mixed >> 13)


@jax.jit
def _of_chunk(words: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _weighted(words, lax.iota(jnp.uint32, _CHUNK) + start)


def _of_host_array(value: np.ndarray) -> tuple[int, int]:
    flat = np.ascontiguousarray(value).reshape(-1)
    per_element = max(1, flat.dtype.itemsize // 4)
    sums = [0, 0]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for start in range(0, flat.size * per_element, _CHUNK):
            words = _host_words(flat[start // per_element : (start + _CHUNK) // per_element])
            padded = np.zeros(_CHUNK, np.uint32)
            padded[: words.size] = words
            for lane, part in enumerate(_of_chunk(padded, np.uint32(start & 0xFFFFFFFF))):
                sums[lane] = (sums[lane] + int(part)) & 0xFFFFFFFF
    return sums[0], sums[1]


def _host_words(flat: np.ndarray) -> np.ndarray:
    if flat.dtype.itemsize >= 4:
        return flat.view(np.uint32)
    try:
        bits = jnp.iinfo(flat.dtype).bits
    except ValueError:
        bits = 8 * flat.dtype.itemsize
    unsigned = flat.view(np.dtype(f"uint{8 * flat.dtype.itemsize}")).astype(np.uint32)
    return unsigned & np.uint32((1 << bits) - 1)  # int4 lies in a byte of which half means nothing


def write_own_digests(payload: epath.Path, arrays: str) -> None:
    """Every process: digests of the files that it wrote, for process 0; call it when its shards are on disk."""
    own = payload / arrays / f"ocdbt.process_{jax.process_index()}"
    if not own.is_dir() or jax.process_count() == 1:
        return  # one process hashes everything at the commit
    digests = file_digests(payload, [f"{arrays}/{own.name}/{name}" for name, _ in filesystem.walk_files(own)])
    (payload / _DIRECTORY).mkdir(exist_ok=True, parents=True)
    filesystem.write_durably(payload / _DIRECTORY / f"{jax.process_index()}.json", json.dumps(digests).encode())


def collect_digests(payload: epath.Path) -> dict[str, str]:
    """Process 0, after all wrote theirs: the digest of every file of the payload, by its relative path."""
    known: dict[str, str] = {}
    directory = payload / _DIRECTORY
    if directory.is_dir():
        for file in directory.iterdir():
            known |= json.loads(file.read_text())
        filesystem.remove_tree(directory)
    return {
        name: known[name] if name in known else file_digests(payload, [name])[name] for name, _ in filesystem.walk_files(payload)
    }


def file_digests(root: epath.Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files, read from storage."""
    digests = {}
    for name in names:
        digest = hashlib.sha256()
        with (root / name).open("rb") as file:
            for block in iter(functools.partial(file.read, 1 << 22), b""):
                digest.update(block)
        digests[name] = digest.hexdigest()
    return digests
