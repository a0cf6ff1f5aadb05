"""The account of time, the ledger and the goodput of a job that was started again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from xlatrain.cli import main
from xlatrain.cluster.watch import progress
from xlatrain.cluster.watch.account import Account
from xlatrain.cluster.watch.goodput import goodput
from xlatrain.cluster.watch.ledger import Ledger, LedgerError, read


def test_every_second_belongs_to_the_innermost_span() -> None:
    told: list[dict[str, float]] = []
    earliest = time.perf_counter()
    account = Account(told=lambda own: told.append(own.seconds()), interval=0.0)
    marks, latest = progress.marks, time.perf_counter()
    with account.span("step"):
        time.sleep(0.02)
        with account.span("data_wait"):
            time.sleep(0.03)
            assert progress.phase == "waiting for data"
        assert progress.phase == "training"
    least = time.perf_counter() - latest
    seconds = account.seconds()
    most = time.perf_counter() - earliest
    assert progress.marks == marks + 4
    assert seconds["step"] >= 0.02
    assert seconds["data_wait"] >= 0.03
    assert seconds["compile"] == seconds["save"] == 0
    assert least <= sum(seconds.values()) <= most
    assert len(told) == 2


def event(kind: str, at: float, step: int, pid: int, **facts: Any) -> dict[str, Any]:
    return {"event": kind, "time": at, "step": step, "pid": pid, "fit": 1, **facts}


JOB = [
    event("begin", 100, 0, 1),
    event("progress", 120, 10, 1, seconds={"setup": 5, "compile": 5, "step": 10}),
    event("progress", 140, 30, 1, seconds={"setup": 5, "compile": 5, "step": 30}),
    # killed at about 145; the newest checkpoint was step 20
    event("begin", 160, 20, 2),
    event("end", 200, 50, 2, seconds={"setup": 5, "compile": 2, "step": 30, "save": 3}, outcome="finished"),
]


def test_a_run_that_was_killed_before_its_first_line_had_reached_what_it_saved() -> None:
    found = goodput([event("begin", 100, 0, 1), event("begin", 110, 10, 2), event("end", 120, 64, 2, seconds={"step": 9})])
    assert found is not None
    assert [(loss.step, loss.lost_steps) for loss in found.losses] == [(10, 0)]


def test_work_done_twice_and_the_time_between_runs_are_no_goodput() -> None:
    found = goodput(JOB)
    assert found is not None
    assert found.wall_s == 100
    assert (found.steps, found.lost_steps, found.runs) == (50, 10, 2)
    # Steps 10 to 30 took 20 s: those after 20 half of it.
    assert found.seconds["lost"] == 10
    assert found.seconds["step"] == 50
    assert found.seconds["down"] == 20
    assert sum(found.seconds.values()) == 100
    assert found.ratio == 0.5
    assert str(found).startswith(
        "goodput 50.0% of 100.0 s in 2 run(s), 50 steps, 10 of them twice: step 50.0 s (50.0%), down 20.0 s"
    )


def test_a_checkpoint_that_was_saved_after_the_last_line_counts() -> None:
    resumed = [{**JOB[3], "step": 35}, {**JOB[4], "step": 50}]
    found = goodput([*JOB[:3], *resumed])
    assert found is not None
    assert (found.steps, found.lost_steps) == (50, 0)


def test_a_second_fit_of_the_script_is_no_restart() -> None:
    second = [{**line, "fit": 2, "time": line["time"] + 40} for line in JOB[:3]]
    found = goodput([*JOB[:3], *second])
    assert found is not None
    assert (found.steps, found.lost_steps, found.runs) == (60, 0, 2)
    assert goodput([]) is None


def test_a_ledger_is_read_up_to_where_a_kill_cut_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "folder" / "ledger.jsonl")
    progress.step = 7
    ledger.write("begin", fit=1)
    progress.step = 0
    with ledger.path.open("a") as file:
        file.write('{"event": "prog')
    [only] = ledger.read()
    assert (only["event"], only["step"], only["fit"]) == ("begin", 7, 1)
    ledger.path.write_text('not json\n{"event": "begin", "time": 1}\n')
    with pytest.raises(LedgerError, match=r"ledger\.jsonl, line 1: expected a JSON object with event"):
        read(ledger.path)


def test_a_ledger_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "ledger.jsonl", tmp_path):
        with pytest.raises(OSError, match=f"XLATRAIN_LEDGER='{path}': cannot be written"):
            Ledger(path)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in JOB))
    assert main(["goodput", str(path)]) == 0
    assert capsys.readouterr().out.startswith("goodput 50.0% of 100.0 s")
    assert main(["goodput", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lost_steps"] == 10
    assert main(["goodput", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    path.write_text("")
    assert main(["goodput", str(path)]) == 1


def test_each_loss_is_told_with_what_it_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"step": 10.0}
    events: list[dict[str, Any]] = [
        {"event": "begin", "time": 0.0, "pid": 1, "fit": 1, "step": 0, "processes": 3},
        {"event": "progress", "time": 12.0, "pid": 1, "fit": 1, "step": 10, "seconds": seconds},
        {"event": "begin", "time": 20.0, "pid": 2, "fit": 1, "step": 8, "processes": 2},
        {"event": "end", "time": 32.0, "pid": 2, "fit": 1, "step": 18, "seconds": seconds},
        {"event": "begin", "time": 33.0, "pid": 3, "fit": 1, "step": 18, "processes": 3},
        {"event": "end", "time": 40.0, "pid": 3, "fit": 1, "step": 20, "seconds": {"step": 4.0}},
    ]
    found = goodput(events)
    assert found is not None
    assert [str(loss) for loss in found.losses] == [
        "at step 10, 3 → 2 processes: 2 steps again (2.0 s), down for 8.0 s",
        "at step 18, 2 → 3 processes: 0 steps again (0.0 s), down for 1.0 s",
    ]
    (tmp_path / "ledger").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert main(["goodput", str(tmp_path / "ledger")]) == 0
    assert "\n  lost at step 10, 3 → 2 processes: 2 steps again" in capsys.readouterr().out
