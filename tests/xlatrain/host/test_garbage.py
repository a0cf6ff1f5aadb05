"""Garbage of what was made lately, which is found without a walk over all that the process holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from xlatrain.host.garbage import older_left_out


class Node:
    other: Node


def cycle() -> weakref.ref[Node]:
    one, other = Node(), Node()
    one.other, other.other = other, one
    return weakref.ref(one)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_there_is_not_walked_over() -> None:
    gc.disable()
    before, old = cycle(), Node()
    with older_left_out():
        assert not gc.isenabled()
        gone, stays = cycle(), Node()
        with older_left_out():
            gc.collect()
        assert gone() is None and before() is not None
        there = gc.get_objects()
        assert any(one is stays for one in there) and not any(one is old for one in there)
        del there
    gc.enable()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


def test_objects_that_others_have_frozen_stay_so() -> None:
    gc.freeze()
    with older_left_out():
        gone = cycle()
        gc.collect()
        assert gone() is None
    assert gc.get_freeze_count() > 0
