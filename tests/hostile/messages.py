"""Messages to the port of a launch from somebody who does not belong, by kind and at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

MARK = "xlatrain-watch"
VERSIONS = {"xlatrain": "0", "jax": "0", "jaxlib": "0"}
HELLO = {MARK: 1, "process": 1, "count": 2, "host": "elsewhere", "pid": 1, "versions": VERSIONS}
BEAT = {
    "marks": 1,
    "step": 1,
    "phase": "training",
    "waiting": None,
    "waits_s": 0.0,
    "idle_s": 0.0,
    "armed": True,
    "hang_after": 1.0,
    "left": None,
}
ODD: list[Any] = [
    *(None, True, -1, 0, 2**70, 1e308, float("nan"), float("inf"), "", "0", "word", "\0", "x" * 5000),
    *([], [1], {}, {"a": {}}, [[[[]]]]),
]
PROGRAMS = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"SSH-2.0-x\r\n", b"\n\n\n", b"0" * 64 + b"{}\n")


def messages(seed: int, count: int) -> Iterator[bytes]:
    """Lines, some of them without an end, none of which a process of ours has sent."""
    chance = random.Random(seed)
    makers = [_other_values, _missing, _nested, _noise, _cut, _long, _other_programs]
    for number in range(count):
        yield makers[number % len(makers)](chance)


def _base(chance: random.Random) -> dict[str, Any]:
    kinds = [HELLO, BEAT, {"verdict": "all is lost"}, {"refused": "go away"}, {"go": HELLO}, {"challenge": "0"}, {"left": "x"}]
    return dict(chance.choice(kinds))


def _other_values(chance: random.Random) -> bytes:
    message = _base(chance)
    for name in chance.sample(sorted(message), chance.randint(1, len(message))):
        message[name] = chance.choice(ODD)
    return json.dumps(message).encode() + b"\n"


def _missing(chance: random.Random) -> bytes:
    message = {MARK: 1, **_base(chance)}
    for name in chance.sample(sorted(message), chance.randint(1, len(message))):
        del message[name]
    return json.dumps(message).encode() + b"\n"


def _nested(chance: random.Random) -> bytes:
    depth = chance.choice([10, 1000, 100_000])
    return chance.choice([b"[", b'{"a":']) * depth + b"\n"


def _noise(chance: random.Random) -> bytes:
    return chance.randbytes(chance.randint(0, 300)) + chance.choice([b"\n", b""])


def _cut(chance: random.Random) -> bytes:
    text = _other_values(chance)
    return text[: chance.randint(0, len(text))] + chance.choice([b"\n", b""])


def _long(chance: random.Random) -> bytes:
    return b"x" * chance.choice([1 << 10, 1 << 17]) + chance.choice([b"\n", b""])


def _other_programs(chance: random.Random) -> bytes:
    return chance.choice(PROGRAMS)
