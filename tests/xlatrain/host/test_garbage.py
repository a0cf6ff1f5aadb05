"""Garbage of what was made lately, which is found without a walk over all that the process holds."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest

from xlatrain.host.garbage import Recent, uncollected


class Node:
    other: Node


def cycle() -> weakref.ref[Node]:
    one, other = Node(), Node()
    one.other, other.other = other, one
    return weakref.ref(one)


@pytest.mark.parametrize("collect", [None, gc.collect, lambda: gc.collect(0), lambda: gc.collect(1)])
def test_what_was_made_since_is_freed_and_what_is_left_is_known(collect: Callable[[], int] | None) -> None:
    with uncollected():
        recent = Recent()
        gone, stays = cycle(), Node()
        if collect is not None:  # by the user's code
            collect()
            gone = cycle()
        recent.collect()
        assert gone() is None
        assert any(one is stays for one in recent.instances(Node))
        gone, later = cycle(), Node()
        recent.collect()
        assert gone() is None and sys.getrefcount(stays) == 2
        left = recent.instances(Node)
        assert any(one is stays for one in left) and any(one is later for one in left)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_there_is_not_walked_over() -> None:
    with uncollected():
        before, old = cycle(), Node()
        recent = Recent()
        recent.collect()
        assert before() is not None and not any(one is old for one in recent.instances(Node))
    gc.collect()
    assert before() is None
