"""Accidents and malice to the files of a checkpoint: every kind at every file, and manifests that no save writes."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from xlatrain.checkpoint.record import CommitRecord

Damage = Callable[[Path, random.Random], None]


def _flip(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _flip_many(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes() or b"\0")
    for _ in range(chance.randint(2, 50)):
        data[chance.randrange(len(data))] ^= chance.randint(1, 255)
    data[0] ^= 1  # several may cancel each other
    file.write_bytes(data if data != file.read_bytes() else data[:-1])


def _zero(file: Path, _: random.Random) -> None:
    size = file.stat().st_size
    file.write_bytes(b"\0" * size if file.read_bytes() != b"\0" * size else b"\1" * max(size, 1))


def _truncate(file: Path, chance: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, chance.randrange(size) if size else 1)


def _append(file: Path, chance: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(chance.randbytes(chance.randint(1, 100)))


def _remove(file: Path, _: random.Random) -> None:
    file.unlink()


def _become_directory(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _become_pipe(file: Path, _: random.Random) -> None:
    """Whoever opens it without looking waits without end."""
    file.unlink()
    os.mkfifo(file)


def _lead_out(file: Path, _: random.Random) -> None:
    """A link to the same bytes elsewhere, which somebody may change."""
    outside = Path(f"{file.parents[len(file.parents) - 3]}") / f"outside-{os.getpid()}-{file.name}"
    shutil.move(file, outside)
    file.symlink_to(outside)


def _lead_to_itself(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _become_device(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _swap(file: Path, chance: random.Random) -> None:
    """With another file of the checkpoint."""
    others = sorted(other for other in file.parent.rglob("*") if other.is_file() and other.read_bytes() != file.read_bytes())
    if not others:
        return _flip(file, chance)
    file.write_bytes(chance.choice(others).read_bytes())
    return None


KINDS: tuple[Damage, ...] = (
    *(_flip, _flip, _flip, _flip_many, _zero, _truncate, _append, _remove, _become_directory, _become_pipe),
    *(_lead_out, _lead_to_itself, _become_device, _swap),
)


def damages(checkpoint: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Damage a checkpoint, ``count`` times by turns of kind and file; between two it is whole again.

    Yields:
        What was done, and the checkpoint.
    """
    chance = random.Random(seed)
    whole = checkpoint.parent / f"whole-{checkpoint.name}"
    shutil.copytree(checkpoint, whole)
    files = sorted(file.relative_to(checkpoint) for file in checkpoint.rglob("*") if file.is_file())
    for number in range(count):
        file, kind = files[number % len(files)], chance.choice(KINDS)
        kind(checkpoint / file, chance)
        yield f"{number}: {kind.__name__} of {file}", checkpoint
        shutil.rmtree(checkpoint)
        for left in checkpoint.parent.glob("outside-*"):
            left.unlink()
        shutil.copytree(whole, checkpoint)
    shutil.rmtree(whole)


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 40, 1 << 70, 1e308, "", "x", "../../etc/passwd", [], [1], {}, {"a": 1}, [[[[1]]]]),
    *({"shape": [1 << 40, 32], "dtype": "float32", "key_impl": None}, {"shape": [-1], "dtype": "float32", "key_impl": None}),
    *({"shape": [3], "dtype": "object", "key_impl": None}, {"shape": [3], "dtype": "os.system", "key_impl": None}),
    *({"shape": ["3"], "dtype": "float32", "key_impl": None}, {"shape": 3, "dtype": "float32", "key_impl": None}),
    *({"shape": [0, 1 << 62], "dtype": "float32", "key_impl": None}, {"shape": [3], "dtype": "key<x>", "key_impl": "evil"}),
    *({"shape": [2], "dtype": "float32", "key_impl": None}, {"shape": [3], "dtype": "int32", "key_impl": None}),
)


def manifests(fields: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Manifests that no save writes, in place of ``fields``: what they are, and their bytes."""
    for value in ODD_VALUES:
        yield f"{value!r} alone", json.dumps(value).encode()
    yield "no JSON", b"{"
    yield "no text", b"\xff\xfe"
    yield "deep", b"[" * 100_000
    yield "long numbers", b'{"arrays": ' + b"9" * 10_000 + b"}"
    for name in fields:
        rest = {key: value for key, value in fields.items() if key != name}
        yield f"without {name}", json.dumps(rest).encode()
        for value in ODD_VALUES:
            yield f"{name} = {value!r}", json.dumps({**rest, name: value}).encode()
    for part in ("arrays", "digests", "sizes"):
        for entry in fields[part]:
            for value in ODD_VALUES:
                changed = copy.deepcopy(fields)
                changed[part][entry] = value
                yield f"{part}[{entry!r}] = {value!r}", json.dumps(changed).encode()


def commit(checkpoint: Path, manifest: bytes) -> None:
    """Put a manifest there, and the digest that makes it right."""
    pointer = checkpoint / "CURRENT"
    record = json.loads(pointer.read_bytes())
    (checkpoint / record["payload"] / "manifest.json").write_bytes(manifest)
    pointer.write_bytes(CommitRecord(record["payload"], record["committed_ns"], hashlib.sha256(manifest).hexdigest()).line())


def pointers(record: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Commit records that no save writes."""
    yield from ((f"{text[:20]!r}…", text) for text in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 10_000, b"null", b"[]", b"7"))
    for name in record:
        yield f"without {name}", json.dumps({key: value for key, value in record.items() if key != name}).encode()
        for value in ODD_VALUES:
            yield f"{name} = {value!r}", json.dumps({**record, name: value}).encode()


ODD_SHAPES = ([-8], [-2, -4], [8.0], ["8"], [True] * 8, [1 << 70], [0, 32, 64], [32, 0], [-32, 0], [0, 1 << 70], "F33")


def safetensors_headers() -> Iterator[tuple[str, bytes]]:
    """Headers for 64 bytes of tensors, none of which describes them."""
    good = {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}
    yield "deep", b"[" * 100_000
    yield "deep objects", b'{"a":' * 50_000
    yield "no object", b"[1, 2]"
    yield "null", b"null"
    yield "no text", b"\xff" * 10
    yield "metadata", json.dumps({"__metadata__": [1], "a": good}).encode()
    for value in (*ODD_VALUES, *ODD_SHAPES):
        for name in good:
            if value == [8] or (name == "shape" and value in ([], [1])):
                continue
            yield f"{name} = {value!r}", json.dumps({"a": {**good, name: value}}).encode()
        yield f"tensor = {value!r}", json.dumps({"a": value}).encode()
    for name in good:
        yield f"without {name}", json.dumps({"a": {key: value for key, value in good.items() if key != name}}).encode()
    yield "overlap", json.dumps({"a": good, "b": {**good, "data_offsets": [16, 48]}}).encode()
    yield "twice", json.dumps({"a": good, "b": good}).encode()
