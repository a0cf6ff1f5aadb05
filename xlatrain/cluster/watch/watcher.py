"""The thread of each process that tells the others where it is, hears how they are, and sounds the alarm."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from xlatrain.cluster.watch import settings as settings_module
from xlatrain.cluster.watch.alarm import LOST_PEER, STDERR, delay_abort, say, show_stacks, stacks
from xlatrain.cluster.watch.progress import progress
from xlatrain.cluster.watch.roll_call import answer_roll, call_roll, introduction
from xlatrain.cluster.watch.settings import WatchSettings
from xlatrain.cluster.watch.verdict import BEAT, GRACE_S, NO_WORD, THE_END, Peer, is_well_formed, lost, slow
from xlatrain.cluster.watch.wire import Message, Wire

_TICK_S = 0.2
_AGAIN = 4
_CLUE_S = 2 * GRACE_S + 2.0  # how long a run that failed on a broken connection waits to hear whose it was


class Watcher:
    """The watch in one process: process 0 hears all others and judges; the others hear and judge process 0.

    Args:
        me: this process.
        wires: the other processes, with the connections to them: all of them on process 0, process 0 alone on the others.
        settings: of the world.
        leave: ends this process with a status, without waiting for others.
        needs_service: whether JAX ends this process when process 0 is gone.

    Attributes:
        stragglers: on process 0, of each process that the others waited for: which, where, how long, its stacks.
    """

    def __init__(
        self,
        me: Peer,
        wires: dict[int, tuple[Peer, Wire]],
        settings: WatchSettings,
        leave: Callable[[int], NoReturn],
        needs_service: Callable[[], bool],
    ) -> None:
        self.me = me
        self._wires = wires
        self._settings = settings
        self._beat_s = settings.beat(len(wires) + 1)
        self._leave = leave
        self._needs_service = needs_service
        self._runs: list[float] = []  # seconds without progress that the runs under way allow
        self._verdict: str | None = None
        self._has_looked = False
        self.stragglers: list[dict[str, Any]] = []
        self._told_slow: dict[tuple[int, int], float] = {}  # process, its marks → idle seconds from which it is named again
        self._sends = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="xlatrain-watch", daemon=True)

    def start(self) -> None:
        os.register_at_fork(after_in_child=self._forget)
        delay_abort()
        self._thread.start()

    # -- what the main thread calls --------------------------------------------------------------------------------

    def enter(self, hang_after: float) -> None:
        """A run begins: from now on the alarm ends this process."""
        self._runs.append(hang_after if self._settings.hang_after is None else self._settings.hang_after)
        progress.mark("beginning a run")
        self._arm_dump()

    def exit(self, error: BaseException | None) -> None:
        """The run is over. If it failed as runs do whose peer is gone, the watch gets the time to say which peer."""
        if error is not None:
            self.look_for_lost(error)
        if error is None:  # else the others shall hear where it failed
            progress.mark("after a run")
        self._runs.pop()
        if not self._runs:
            faulthandler.cancel_dump_traceback_later()

    def look_for_lost(self, error: BaseException) -> None:
        """Wait until the watch knows the lost peer and ends this process, where ``error`` may come of one; else do nothing."""
        if not self._closed.is_set() and not self._has_looked and _is_of_connection(error):
            self._has_looked = True
            say(f"process {self.me.process} failed ({in_a_line(error)}); looking for a process that is lost")
            if self._closed.wait(_CLUE_S):
                self._thread.join()  # it ends this process

    def depart(self, how: str | None) -> None:
        """Tell the others that the process ends: ``how`` in words, None if all went well.

        Where process 0 has ended well, JAX lets it wait for the others: until they come, it still looks after them.
        """
        if how is None and self.me.process == 0 and any(peer.ended is None for peer, _ in self._wires.values()):
            progress.mark("its end")
            progress.waiting = THE_END
        elif not self._closed.is_set():
            self._closed.set()
            self._tell({**self._state(), "left": how})

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, (_, wire) in self._wires.items():
                selector.register(wire.socket, selectors.EVENT_READ, process)
            last = next_beat = 0.0
            while not self._closed.is_set():
                now = time.monotonic()
                if last and now - last > self._settings.dead_after / 2:  # this process slept: the others may not have
                    self._excuse_silence(now)
                last = now
                if now >= next_beat:
                    self._beat()
                    next_beat = now + self._beat_s
                for key, _ in selector.select(min(_TICK_S, self._beat_s)):
                    if not self._hear(key.data, time.monotonic()):
                        selector.unregister(key.fileobj)
                self._judge(time.monotonic())

    def _beat(self) -> None:
        beat = self._state()
        self.me.note_beat(beat, time.monotonic())
        self._tell(beat)
        if self._runs:
            self._arm_dump()

    def _arm_dump(self) -> None:
        """Let faulthandler show which thread holds the interpreter, if this thread does not get it for ``dead_after`` seconds."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            faulthandler.dump_traceback_later(self._settings.dead_after, exit=False, file=STDERR)

    def _state(self) -> Message:
        return {
            "marks": progress.marks,
            "step": progress.step,
            "phase": progress.phase,
            "waiting": progress.waiting,
            "waits_s": round(progress.waits_s, 3),
            "idle_s": round(progress.idle_s, 3),
            "armed": bool(self._runs),
            "hang_after": self._runs[-1] if self._runs else 0.0,
        }

    def _tell(self, message: Message) -> None:
        with self._sends:
            for peer, wire in self._wires.values():
                if peer.ended is None:
                    with contextlib.suppress(OSError):  # the end of the connection is noticed where it is read
                        wire.send(message)

    def _hear(self, process: int, now: float) -> bool:
        """Read what a process told; False when nothing will come from it any more."""
        peer, wire = self._wires[process]
        try:
            messages = wire.receive(strict=False)
        except TimeoutError:
            return True
        except OSError:  # reset: it died with something unread (or the network has broken, which JAX does not survive either)
            messages = None
        if messages is None:
            peer.is_gone = True
            peer.end(NO_WORD, now)
            return False
        for message in messages:
            if isinstance(message.get("verdict"), str) and process == 0:
                peer.seen = now
                self._verdict = self._verdict or message["verdict"]
            elif message.get("slow") is True and process == 0:
                self._tell({"stacks": stacks()})
            elif isinstance(message.get("stacks"), str) and self.me.process == 0:
                self._show_straggler(peer, message["stacks"])
            elif is_well_formed(message, BEAT) and isinstance(message.get("left", ""), str | None):
                peer.note_beat(message, now)
                if "left" in message:
                    peer.end(message["left"], now)
            else:
                wire.dropped += 1
        return True

    def _excuse_silence(self, now: float) -> None:
        for peer, _ in self._wires.values():
            peer.seen = now

    def _judge(self, now: float) -> None:
        if self._verdict is None:
            peers = [self.me, *(peer for peer, _ in self._wires.values())]
            self.me.note_beat(self._state(), now)
            if self.me.process == 0:
                self._verdict = lost(peers, now, self._settings.dead_after)
            else:  # whether somebody hangs is process 0's to say: it knows all
                self._verdict = lost(peers[1:], now, self._settings.dead_after, hangs=False)
            if self._verdict is not None and self.me.process == 0:
                self._tell({"verdict": self._verdict})
            if self._verdict is None and self.me.process == 0:
                self._look_for_slow(peers)
        if self._verdict is not None and (self._runs or self._is_doomed() or progress.waiting == THE_END):
            self._sound(self._verdict)

    def _look_for_slow(self, peers: list[Peer]) -> None:
        """Name the processes that the others wait for, and show their stacks; again when that has taken much longer."""
        found = slow(peers, self._settings.slow_after)
        told = self._told_slow
        new = [] if found is None else [peer for peer in found[0] if peer.idle_s >= told.get((peer.process, peer.marks), 0.0)]
        if found is None or not new:
            return
        told |= {(peer.process, peer.marks): _AGAIN * peer.idle_s for peer in new}
        say(f"{found[1]}. All end after {max(peer.hang_after for peer in peers):.0f} s without progress (--hang-after; 0: never)")
        for peer in new:
            facts = {"process": peer.process, "host": peer.host, "step": peer.step, "phase": peer.phase}
            self.stragglers.append({**facts, "seconds": round(peer.idle_s, 1), "stacks": None})
            if peer is self.me:
                self._show_straggler(peer, stacks())
            else:
                with contextlib.suppress(OSError):
                    self._wires[peer.process][1].send({"slow": True})

    def _show_straggler(self, peer: Peer, text: str) -> None:
        say(f"stacks of {peer}, at step {peer.step} ({peer.phase}):\n{text}")
        for one in self.stragglers:
            if one["process"] == peer.process and one["stacks"] is None:
                one["stacks"] = text.splitlines()

    def _is_doomed(self) -> bool:
        """Whether JAX ends this process in a moment: its service has gone with process 0."""
        if self.me.process == 0:
            return False
        first = self._wires[0][0]
        return first.is_gone and first.how is not None and self._needs_service()

    def _sound(self, verdict: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        say(f"{verdict}. {self.me} ends with status {LOST_PEER}; start all again")
        show_stacks(str(self.me))
        self.depart("ended because another process is lost")
        if self.me.process != 0 and self._wires[0][0].ended is not None:
            os._exit(LOST_PEER)  # JAX's service is gone with process 0: nobody to part from
        self._leave(LOST_PEER)

    def _forget(self) -> None:
        """Close the connections in a forked child: they are the parent's, and must end with the parent."""
        self._closed.set()
        for _, wire in self._wires.values():
            wire.close()


_watcher: Watcher | None = None
_joined: tuple[Peer, dict[int, tuple[Peer, Wire]], WatchSettings] | None = None
_address: str | None = None


def join(address: str, process: int, count: int, timeout: float) -> float:
    """Meet the other processes, before JAX joins them.

    Args:
        address: ``host:port`` of the coordinator.
        process: this one.
        count: processes of the world.
        timeout: seconds to wait for them; ``XLATRAIN_JOIN_WITHIN`` is stronger.

    Returns:
        Seconds that are left of it, at least 10.

    Raises:
        JoinError: names who did not come, or does not belong.
        ValueError: a variable with no valid value.
    """
    global _joined, _address
    if not settings_module.is_on():
        return timeout
    started = time.monotonic()
    timeout = settings_module.seconds(settings_module.JOIN_WITHIN) or timeout
    me = Peer.of_hello(introduction(process, count), started)
    if process == 0:
        settings = WatchSettings.of_environment()
        others, _address = call_roll(address, count, timeout, {"settings": vars(settings)})
        _joined = me, others, settings
    else:
        first, wire, welcome = answer_roll(address, process, count, timeout)
        _joined = me, {0: (first, wire)}, WatchSettings(**welcome["settings"])
        _address = wire.address or welcome["address"]  # without one of its own it is on process 0's host
    return max(10.0, timeout - (time.monotonic() - started))


def address() -> str | None:
    """The address of this host for processes on other hosts; None: there are none, or :func:`join` met nobody."""
    return _address


def start(leave: Callable[[int], NoReturn], needs_service: Callable[[], bool]) -> None:
    """Watch, once JAX has joined the processes.

    Args:
        leave: ends this process with a status, without waiting for others.
        needs_service: whether JAX ends this process when process 0 is gone.
    """
    global _watcher
    if _joined is not None and _watcher is None:
        now = time.monotonic()
        for peer, _ in _joined[1].values():
            peer.seen = now
        _watcher = Watcher(*_joined, leave, needs_service)
        _watcher.start()


def stragglers() -> list[dict[str, Any]]:
    """On process 0 the processes that the others waited for so far (``XLATRAIN_SLOW_AFTER``): which, where, how long, stacks."""
    return [] if _watcher is None else list(_watcher.stragglers)


@contextlib.contextmanager
def armed(hang_after: float) -> Iterator[None]:
    """Watch over a run in the block: a lost process ends it, with its name (:data:`LOST_PEER`). With one process do nothing.

    Args:
        hang_after: seconds without progress after which the process that is behind is lost; 0: never.
            ``XLATRAIN_HANG_AFTER`` on process 0 is stronger.
    """
    watcher = _watcher
    if watcher is None:
        yield
        return
    watcher.enter(hang_after)
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        raise
    finally:
        watcher.exit(failure)


def ends_with(error: BaseException) -> None:
    """Announce that the process is about to end with ``error``; the watch ends it where that is a lost peer's doing."""
    if _watcher is not None:
        _watcher.look_for_lost(error)
        _watcher.depart(f"ended with {in_a_line(error)}")


def depart(how: str | None) -> None:
    """Announce that the process is about to end; ``how`` in words (``"exited with status 1"``), None if all went well."""
    if _watcher is not None:
        _watcher.depart(how)


def _is_of_connection(error: BaseException) -> bool:
    """Whether this may be how a lost peer looks from here: a collective that broke."""
    import jax

    words = ("onnection", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "gloo", "NCCL", "peer")
    return isinstance(error, jax.errors.JaxRuntimeError | TimeoutError) and any(word in str(error) for word in words)


def in_a_line(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
