"""Named arrays in and out of a directory, by Orbax (OCDBT over zarr 3: each process writes only the shards that it owns).
Their names are pytree paths: ``{"params": {"fc.weight": w}}`` is stored as ``params/fc.weight``.

Orbax's stable v0 interface (``AsyncCheckpointer``, ``PyTreeCheckpointHandler``) is used; its v1 is still called experimental.
Importing it takes 0.3 s, which most runs have no use for: the first that writes or reads arrays this way does.
Orbax: https://orbax.readthedocs.io/en/latest/guides/checkpoint/orbax_checkpoint_101.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from xlatrain.checkpoint.agreement import TIMEOUT_S, Rendezvous
from xlatrain.checkpoint.chunk_files import damaged_array, damaged_file
from xlatrain.checkpoint.errors import CorruptCheckpointError
from xlatrain.checkpoint.library_output import KeptBack, watch_reads
from xlatrain.checkpoint.manifest import ArrayMetadata

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

SEPARATOR = "/"


def flatten_names(tree: Any) -> tuple[dict[str, Any], Any]:
    """The leaves of a pytree by name, in flattening order, and the tree's structure.

    ``None`` is an empty node, as everywhere in JAX: it has no name and is not stored.

    Raises:
        ValueError: two leaves get the same name (``{"a/b": x, "a": {"b": y}}``), or a leaf is the root and has none.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    named: dict[str, Any] = {}
    for key_path, leaf in leaves:
        name = jax.tree_util.keystr(key_path, simple=True, separator=SEPARATOR)
        if not name:
            raise ValueError("arrays is a single array or has an empty key; give a pytree with names, e.g. {'weight': array}")
        if name in named:
            raise ValueError(f"two arrays have the same name {name!r} (keys are joined by {SEPARATOR!r}); rename one of the keys")
        named[name] = leaf
    return named, structure


LAYOUT = ("_METADATA",)
"""Files by which Orbax reads arrays, relative to their directory, that have no checksum in themselves."""


def describe(name: str, value: Any) -> ArrayMetadata:
    """Metadata of an array, or of a template leaf, from its ``shape`` and ``dtype``.

    Raises:
        TypeError: the value has none, e.g. a Python number.
    """
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(
            f"arrays[{name!r}] is {type(value).__name__}; expected a jax.Array or a numpy array: wrap a number in "
            "numpy.asarray(...), or put host state into files"
        )
    dtype = value.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return ArrayMetadata(tuple(value.shape), np.dtype(dtype).name)
    key_impl = str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else None
    return ArrayMetadata(tuple(value.shape), str(dtype), key_impl)


class ArrayWriter:
    """A save in flight. The constructor returns when the arrays are off the devices; :meth:`wait` when they are on disk.

    Attributes:
        metadata: of every array, by name.

    Args:
        directory: where to write; must not exist.
        arrays: name → global ``jax.Array`` (each process writes the shards it holds the first copy of), or numpy array
            (process 0's is written).
        rendezvous: where the processes meet.
    """

    def __init__(self, directory: epath.Path, arrays: Mapping[str, Any], rendezvous: Rendezvous) -> None:
        self.metadata = {name: describe(name, value) for name, value in arrays.items()}
        stored = {name: _to_store(value) for name, value in arrays.items() if 0 not in value.shape}
        self._checkpointer = None
        if not stored:
            return
        from xlatrain.checkpoint.orbax_parts import CHECKED, ocp

        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=CHECKED),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=TIMEOUT_S, barrier_sync_fn=lambda *, key, timeout_ms: rendezvous.meet()
            ),
        )
        self._printed = KeptBack()
        try:
            self._checkpointer.save(directory, args=ocp.args.PyTreeSave(stored))
        except BaseException:
            self._printed.end(saved=False)
            raise

    def wait(self) -> None:
        """Block until every process has written its shards; raises what went wrong."""
        if self._checkpointer is not None:
            saved = False
            try:
                self._checkpointer.wait_until_finished()
                saved = True
            finally:
                self._checkpointer.close()
                self._printed.end(saved=saved)


def check_storable(arrays: Mapping[str, Any]) -> None:
    """Refuse, by name, what cannot be saved.

    Raises:
        TypeError: a leaf is no ``jax.Array`` and no numpy array of numbers.
        ValueError: an array was deleted, or lives on one of several processes only.
    """
    for name, value in arrays.items():
        describe(name, value)
        if isinstance(value, jax.Array):
            _check_jax_array(name, value)
        elif not isinstance(value, (np.ndarray, np.generic)):
            raise TypeError(f"arrays[{name!r}] is {type(value).__name__}; expected a jax.Array or a numpy array")
        elif value.dtype.hasobject:
            raise TypeError(f"arrays[{name!r}] is a numpy array of Python objects; put it into files instead")


def _check_jax_array(name: str, value: jax.Array) -> None:
    if value.is_deleted():
        raise ValueError(f"arrays[{name!r}] was deleted (donated to a compiled step?); save the state that the step returned")
    if value.is_fully_addressable and jax.process_count() > 1:
        raise ValueError(
            f"arrays[{name!r}] is only on process {jax.process_index()} ({value.sharding}); with {jax.process_count()} processes "
            "give an array sharded over the mesh of all of them, or a numpy array (process 0's is saved)"
        )


def _to_store(value: Any) -> Any:
    """The value that Orbax stores: typed keys as their bits, numpy arrays copied (the caller may change them right away)."""
    if not isinstance(value, jax.Array):
        return np.array(value)
    return jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value


def read_sharded(directory: epath.Path, stored: Mapping[str, ArrayMetadata], template: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Read arrays directly onto their shards; no process reads more than the chunks that its shards touch.

    Args:
        directory: written by :class:`ArrayWriter`.
        stored: metadata of what is read, for every name of the template.
        template: name → something with ``shape``, ``dtype`` and ``sharding``; already checked against ``stored``.
    """
    arrays: dict[str, jax.Array] = {}
    arguments = {}
    for name, leaf in template.items():
        if 0 in leaf.shape:
            arrays[name] = _empty(leaf)
        else:
            arguments[name] = _restore_arguments(stored[name], leaf)
    for name, value in _read(directory, arguments).items():
        key_impl = stored[name].key_impl
        if not isinstance(value, jax.Array):
            _check_described(directory, name, stored[name], value)
        arrays[name] = value if key_impl is None else jax.random.wrap_key_data(value, impl=key_impl)
    return {name: arrays[name] for name in template}


def _restore_arguments(stored: ArrayMetadata, leaf: Any) -> ocp.ArrayRestoreArgs:
    from xlatrain.checkpoint.orbax_parts import ocp

    shape, dtype = tuple(leaf.shape), leaf.dtype
    if stored.key_impl is not None:
        bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        shape, dtype = bits.shape, None
    elif np.dtype(dtype).name == stored.dtype:
        dtype = None  # given a dtype, Orbax sends each shard through a thread, also if there is nothing to convert
    return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=shape, dtype=dtype)


def _empty(leaf: Any) -> jax.Array:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(tuple(leaf.shape), leaf.sharding, lambda index: zeros[index])


def read_numpy(directory: epath.Path, stored: Mapping[str, ArrayMetadata]) -> dict[str, np.ndarray]:
    """Read whole arrays into host memory (typed keys as their bits)."""
    from xlatrain.checkpoint.orbax_parts import ocp

    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name, entry in stored.items() if 0 not in entry.shape}
    read = _read(directory, arguments)
    for name, value in read.items():
        _check_described(directory, name, stored[name], value)
    return {name: read[name] if name in read else np.zeros(entry.shape, jnp.dtype(entry.dtype)) for name, entry in stored.items()}


def _check_described(directory: epath.Path, name: str, entry: ArrayMetadata, value: np.ndarray) -> None:
    """The manifest and the database describe the same array (of a key its bits, which have one dim more)."""
    value = np.asarray(value)  # where nothing is stored, Orbax gives back a number
    shape = value.shape[: len(entry.shape)] if entry.key_impl is not None else value.shape
    if tuple(shape) != entry.shape or (entry.key_impl is None and value.dtype.name != entry.dtype):
        raise CorruptCheckpointError(
            f"{directory.parent.parent}: the array {name!r} is {entry.dtype}{list(entry.shape)} by the manifest, but stored is "
            f"{value.dtype.name}{list(value.shape)}; do not use the checkpoint"
        )


def _read(directory: epath.Path, arguments: Mapping[str, ocp.RestoreArgs]) -> dict[str, Any]:
    if not arguments:
        return {}
    from xlatrain.checkpoint.orbax_parts import ocp, reader

    # The handler itself, not a Checkpointer: reading is then local to this process, with no barrier that a lone reader hangs at.
    handler = reader()
    watch_reads()
    item = dict.fromkeys(arguments, 0)
    try:
        return handler.restore(
            directory, args=ocp.args.PyTreeRestore(item=item, restore_args=dict(arguments), partial_restore=True)
        )
    except Exception as error:  # Orbax raises a bare one around what TensorStore said
        cause = root_cause(error)
        if not isinstance(cause, (OSError, ValueError, KeyError)):  # no memory, for example
            raise
        raise CorruptCheckpointError(_damage(directory, str(cause).split(" [", 1)[0])) from error
    finally:
        handler.close()


def _damage(directory: epath.Path, said: str) -> str:
    path, array, file = directory.parent.parent, damaged_array(said), damaged_file(directory, said)
    what = f"the array {array!r}" if array else "an index of the arrays"
    where = f" (in {directory.parent.name}/{directory.name}/{file})" if file else ""
    return (
        f"{path}: {what} cannot be read{where}: {said}. `xlatrain ckpt verify {path}` names everything that is damaged; copy the "
        "checkpoint again, or restore another one"
    )


def root_cause(error: BaseException) -> BaseException:
    """The error that TensorStore raised: Orbax wraps it into a bare Exception with pages of settings."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
