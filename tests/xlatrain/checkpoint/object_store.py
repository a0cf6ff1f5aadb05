"""A program that saves to ``gs://``: to an object store in this process; TensorStore speaks to it over HTTP, etils by fsspec.

Objects by name, written whole; no directories, so that an empty one does not exist. As much of the JSON API as TensorStore uses:
https://cloud.google.com/storage/docs/json_api/v1/objects

For a run of several processes one process has the store (:func:`serve`), and the others speak to it (:func:`connect`).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import zipfile
from collections.abc import Iterator, MutableMapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, quote, unquote, urlsplit
from urllib.request import Request, urlopen

import fsspec
from fsspec.implementations.memory import MemoryFile
from fsspec.spec import AbstractFileSystem

Objects = MutableMapping[str, tuple[bytes, int]]
objects: Objects = {}  # name, with the bucket → contents, generation
generations = itertools.count(1)


class Api(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self, status: int, body: bytes = b"", generation: int = 0, part: str | None = None) -> None:
        self.send_response(status)
        if part is not None:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-goog-generation", str(generation))
        self.end_headers()
        self.wfile.write(body)

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        bucket, _, name = url.path.split("/b/")[1].partition("/o")
        return f"{bucket}/{query.get('name') or unquote(name.lstrip('/'))}", query

    def _unexpected(self, name: str, query: dict[str, str]) -> bool:
        generation = objects.get(name, (b"", 0))[1]
        return "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation

    def do_GET(self) -> None:
        self._answer(*self._get(*self._asked()))

    def _get(self, name: str, query: dict[str, str]) -> tuple[Any, ...]:
        if name.endswith("/"):
            start = name + query.get("prefix", "")
            found = [{"name": one.split("/", 1)[1]} for one in sorted(objects) if one.startswith(start)]
            return 200, json.dumps({"items": found}).encode()
        if name not in objects:
            return (404,)
        data, generation = objects[name]
        if "Range" not in self.headers:
            return 200, data, generation
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        body = data[int(first) : int(last) + 1 if last else None]
        return 206, body, generation, f"bytes {first}-{int(first) + len(body) - 1}/{len(data)}"

    def do_POST(self) -> None:
        name, query = self._asked()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self._unexpected(name, query):
            self._answer(412)
            return
        objects[name] = data, next(generations)
        bucket, _, key = name.partition("/")
        numbers = {"generation": str(objects[name][1]), "metageneration": "1", "size": str(len(data))}
        self._answer(200, json.dumps({"name": key, "bucket": bucket, **numbers}).encode())

    def do_DELETE(self) -> None:
        name, query = self._asked()
        unexpected = self._unexpected(name, query)
        self._answer(412 if unexpected else 404 if objects.pop(name, None) is None else 204)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Say nothing of who was killed in the middle of a request."""


class Store(AbstractFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    makedirs = mkdir

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path in objects:
            found = {path: {"name": path, "type": "file", "size": len(objects[path][0])}}
        else:
            below = [name for name in objects if name.startswith(path + "/")]
            found = {}
            for name in below:
                child = "/".join(name.split("/")[: path.count("/") + 2])
                kind = "file" if child == name else "directory"
                found[child] = {"name": child, "type": kind, "size": len(objects[name][0]) if kind == "file" else 0}
            if not found:
                raise FileNotFoundError(path)
        return list(found.values()) if detail else sorted(found)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if "r" in mode:
            return MemoryFile(None, path, objects[path][0] if path in objects else _missing(path))
        return Written(path, autocommit)

    def _rm(self, path: str) -> None:
        objects.pop(path, None)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        for name in [name for name in objects if name == path or (recursive and name.startswith(path + "/"))]:
            del objects[name]


def _missing(path: str) -> bytes:
    raise FileNotFoundError(path)


class Written(MemoryFile):
    """Is an object when it is closed, or its transaction ends."""

    def __init__(self, path: str, autocommit: bool) -> None:
        super().__init__(None, path)
        self.name, self.autocommit = path, autocommit

    def close(self) -> None:
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        objects[self.name] = self.getvalue(), next(generations)

    def discard(self) -> None:
        pass


def files(checkpoint: Any, arrays: Any) -> None:
    """One file, a failure while it is written, a directory of its name, and a file again."""

    def archive(contents: bytes, *, fails: bool = False) -> Any:
        def write(file: Any) -> None:
            with zipfile.ZipFile(file, "w") as written:
                written.writestr("archive/data.pkl", contents)
            if fails:
                raise OSError("the connection is gone")

        return lambda: write

    path = "gs://bucket/run/c.ckpt"
    checkpoint.save_file(path, archive(b"one"), facts={"step": 1}, wait=True)
    whole = dict(objects)
    assert list(objects) == ["bucket/run/c.ckpt"] and checkpoint.verify(path).intact
    try:
        checkpoint.save_file(path, archive(b"two", fails=True), wait=True)
    except checkpoint.CheckpointError as error:
        assert "the connection is gone" in str(error)
    assert objects == whole
    first = checkpoint.commit_time_ns(path)
    checkpoint.save(path, arrays, wait=True)
    assert checkpoint.is_checkpoint_directory(path) and "bucket/run/c.ckpt" not in objects
    assert checkpoint.commit_time_ns(path) > first
    checkpoint.save_file(path, archive(b"three"), facts={"step": 3}, wait=True)
    assert list(objects) == ["bucket/run/c.ckpt"] and [one.facts for one in checkpoint.entries("gs://bucket/run")] == [
        {"step": 3}
    ]
    checkpoint.remove(path)
    assert not objects


class Elsewhere(Objects):
    """The objects of the bucket ``bucket`` in a store of another process."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __getitem__(self, name: str) -> tuple[bytes, int]:
        try:
            with self._ask("GET", name) as answer:
                return answer.read(), int(answer.headers["x-goog-generation"])
        except HTTPError as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: tuple[bytes, int]) -> None:
        bucket, _, key = name.partition("/")
        address = f"{self._url}/upload/storage/v1/b/{bucket}/o?name={quote(key, safe='')}"
        urlopen(Request(address, value[0], method="POST")).close()

    def __delitem__(self, name: str) -> None:
        try:
            self._ask("DELETE", name).close()
        except HTTPError as error:
            raise KeyError(name) from error

    def __iter__(self) -> Iterator[str]:
        with self._ask("GET", "bucket/") as answer:
            return iter([f"bucket/{one['name']}" for one in json.load(answer)["items"]])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def _ask(self, method: str, name: str) -> Any:
        bucket, _, key = name.partition("/")
        return urlopen(Request(f"{self._url}/storage/v1/b/{bucket}/o/{quote(key, safe='')}", method=method))


def serve() -> str:
    """Serve the objects of this process, in the background; where."""
    server = Server(("localhost", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://localhost:{server.server_port}"


def connect(url: str, *, elsewhere: bool = False) -> None:
    """Let ``gs://`` be the store that is served there: in this process, or elsewhere."""
    global objects
    if elsewhere:
        objects = Elsewhere(url)
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = url
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "anybody"
    for scheme in ("gcs", "gs"):  # etils' and fsspec's name
        fsspec.register_implementation(scheme, Store, clobber=True)


def main() -> None:
    connect(serve())

    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from xlatrain import checkpoint
    from xlatrain.mesh.mesh import make_mesh

    sharding = NamedSharding(make_mesh({"fsdp": 4}), PartitionSpec("fsdp"))
    arrays = {"w": jax.device_put(np.arange(64.0, dtype=np.float32).reshape(16, 4), sharding), "key": jax.random.key(3)}
    checkpoint.check_shared("gs://bucket/run")
    for step in range(2):
        checkpoint.save("gs://bucket/run/a.ckpt", arrays, {"note": b"%d" % step}, facts={"step": step}, wait=True)
    opened = checkpoint.open_checkpoint("gs://bucket/run/a.ckpt")
    restored = opened.restore(arrays)
    assert np.array_equal(restored["w"], arrays["w"]) and opened.files["note"] == b"1"
    assert len({name.split("/")[3] for name in objects}) == 2, "what the second save replaced is there still"
    assert checkpoint.verify("gs://bucket/run/a.ckpt").intact

    checkpoint.save("gs://bucket/run/b.ckpt", arrays, facts={"step": 2}, wait=True)
    assert str(checkpoint.newest("gs://bucket/run")) == "gs://bucket/run/b.ckpt"
    for name in [one for one in objects if "/b.ckpt/" in one and "/d/" in one]:
        data = objects[name][0]
        objects[name] = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :], next(generations)
    assert set(checkpoint.verify("gs://bucket/run/b.ckpt").arrays) == {"w", "key"}
    assert [str(path) for path in checkpoint.prune("gs://bucket/run", checkpoint.Retention(last=1))] == ["gs://bucket/run/a.ckpt"]
    checkpoint.remove("gs://bucket/run/b.ckpt")
    assert not objects
    files(checkpoint, arrays)
    print("done")


if __name__ == "__main__":
    main()
