"""The launcher with real processes: small Python programs that don't need JAX."""

from __future__ import annotations

import io
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.pod import ROOT, environment
from tests.processes import PATIENCE_S, gone, wait_for
from xlatrain.cli import main
from xlatrain.cluster import launch as launching
from xlatrain.cluster.launch import launch


def run(program: str, processes: int = 2, *arguments: str, grace_s: float = 10, **options: Any) -> tuple[int, list[str]]:
    output = io.StringIO()
    status = launch([sys.executable, "-c", program, *arguments], processes, grace_s=grace_s, output=output, **options)
    return status, output.getvalue().splitlines()


def test_each_line_carries_its_process() -> None:
    status, lines = run("import os; print('one'); print('two of', os.environ['XLATRAIN_PROCESS_ID'])", 3)
    assert status == 0
    assert sorted(lines) == ["[0] one", "[0] two of 0", "[1] one", "[1] two of 1", "[2] one", "[2] two of 2"]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] one", "[1] two of 1"]


def test_error_output_progress_bars_and_unfinished_lines_are_lines_too() -> None:
    program = r"import sys; sys.stderr.write('10%\r20%\r\nlast line'); sys.stderr.flush()"
    assert run(program, 1) == (0, ["[0] 10%", "[0] 20%", "[0] last line"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("plain", [False, True])
def test_terminals_get_colours(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    output = Terminal()
    launch([sys.executable, "-c", "print('x')"], 1, output=output)
    assert output.getvalue() == ("[0] x\n" if plain else "\033[36m[0]\033[0m x\n")


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=8")
    monkeypatch.delenv("JAX_PLATFORMS")
    names = "XLATRAIN_COORDINATOR XLATRAIN_PROCESSES XLATRAIN_PROCESS_ID JAX_NUM_CPU_DEVICES JAX_PLATFORMS XLA_FLAGS"
    program = f"import os; [print(os.environ[name]) for name in {names.split()}]"
    _, lines = run(program, 1, devices_per_process=4, coordinator_port=1234)
    assert lines == ["[0] 127.0.0.1:1234", "[0] 1", "[0] 0", "[0] 4", "[0] cpu", "[0] --xla_a=1"]


def test_its_port_is_none_that_systems_hand_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = {launching.free_port() for _ in range(20)}
    assert len(ports) > 1 and max(ports) < 30000
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(launching, "_PORTS", range(port, port + 1))
        assert launching.free_port() not in (0, port)  # none of ours is free: any


def test_arguments_are_passed() -> None:
    assert run("import sys; print(sys.argv[1:])", 1, "--lr", "3", "-m", "x") == (0, ["[0] ['--lr', '3', '-m', 'x']"])


SLEEPER = """
import os, subprocess, sys, time
me = os.environ["XLATRAIN_PROCESS_ID"]
worker = subprocess.Popen(["sleep", "600"])  # not Python, which complains if a signal finds it starting
print("pids", os.getpid(), worker.pid)
"""


def pids(lines: list[str]) -> list[int]:
    return [int(pid) for line in lines if "pids" in line for pid in line.split()[2:]]


def test_a_failure_stops_all_with_its_status_and_leaves_nothing_behind(tmp_path: Path) -> None:
    program = SLEEPER + (
        "open(os.path.join(sys.argv[1], me), 'w')\n"
        "while me != '1' or len(os.listdir(sys.argv[1])) < 3: time.sleep(0.02)\nsys.exit(7)"
    )
    status, lines = run(program, 3, str(tmp_path))
    assert status == 7
    assert "[launch] process 1 exited with status 7; stopping the others" in lines
    assert len(pids(lines)) == 6
    for pid in pids(lines):
        wait_for(lambda pid=pid: gone(pid))


def test_a_process_that_does_not_stop_is_killed_after_the_grace(tmp_path: Path) -> None:
    program = SLEEPER + (
        "import signal\nif me == '0': signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w'); time.sleep(600)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.02)\nsys.exit(3)"
    )
    status, lines = run(program, 2, str(tmp_path / "deaf"), grace_s=0.5)
    assert status == 3
    assert "[launch] processes [0] did not end within 0.5 s; killing them" in lines
    for pid in pids(lines):
        wait_for(lambda pid=pid: gone(pid))


def test_a_signal_that_ends_a_process_is_named() -> None:
    status, lines = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 1)
    assert status == 128 + signal.SIGSEGV
    assert lines == ["[launch] process 0 was ended by SIGSEGV"]


def test_what_a_process_leaves_when_it_ends_well_is_ended_too() -> None:
    status, lines = run(SLEEPER, 1)
    assert status == 0
    wait_for(lambda: all(gone(pid) for pid in pids(lines)))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_are_passed_on(number: signal.Signals, status: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        SLEEPER + "import signal\nfor number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
        "    signal.signal(number, lambda received, _: (print('got', received), sys.exit(0)))\nprint('ready')\ntime.sleep(600)"
    )
    command = [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", "2", str(program)]
    launcher = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    lines: list[str] = []
    assert launcher.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(launcher.stdout or ()))
    with launcher.stdout:
        reader.start()
        wait_for(lambda: sum("ready" in line for line in lines) == 2)
        launcher.send_signal(number)
        assert launcher.wait(PATIENCE_S) == status
        reader.join(PATIENCE_S)
    assert sorted(line.strip() for line in lines if "got" in line) == [f"[{p}] got {number.value}" for p in range(2)]
    for pid in pids(lines):
        wait_for(lambda pid=pid: gone(pid))


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SLEEPER + "time.sleep(600)")
    command = [sys.executable, "-m", "xlatrain.cli", "launch", "--processes", "2", str(program)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True, cwd=ROOT) as launcher:
        assert launcher.stdout is not None
        started = pids([launcher.stdout.readline(), launcher.stdout.readline()])
        launcher.kill()
    assert len(started) == 4
    for pid in started:
        wait_for(lambda pid=pid: gone(pid))


@pytest.mark.parametrize(("processes", "devices", "name"), [(0, 1, "processes"), (1, 0, "devices_per_process")])
def test_counts_are_checked(processes: int, devices: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        launch(["true"], processes, devices)


def test_command_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert main(["launch", "--processes", "1", "--devices-per-process", "2", str(script), "--lr", "3", "--processes", "9"]) == 0
    assert main(["launch", "-n", "1", "-m", "json.tool", "--help"]) == 0
    output = capfd.readouterr().out
    assert "[0] ['--lr', '3', '--processes', '9']" in output
    assert "json.tool [-h]" in output


def test_command_line_without_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--processes", "1"]) == 2
    assert "say what to run" in capsys.readouterr().err
    assert main(["launch", "--processes", "0", "x.py"]) == 2
    assert "processes must be at least 1, not 0" in capsys.readouterr().err


def test_the_launcher_does_not_load_jax() -> None:
    program = (
        "import sys; from xlatrain.cli import main; main(['launch', '-n', '1', '-m', 'this']); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)


def test_a_failed_launch_is_started_again(tmp_path: Path) -> None:
    program = (
        "import os, sys; me = os.environ['XLATRAIN_PROCESS_ID']; print('since', os.environ['XLATRAIN_RESUME_SINCE'])\n"
        "starts = os.path.join(sys.argv[1], me); print(file=open(starts, 'a')); sys.exit(4 if os.path.getsize(starts) < 3 else 0)"
    )
    status, lines = run(program, 1, str(tmp_path), max_restarts=5)
    assert status == 0
    assert [line for line in lines if "starting again" in line] == [f"[launch] starting again ({i} of 5)" for i in (1, 2)]
    assert len([line for line in lines if "since" in line]) == 3
    assert len({line for line in lines if "since" in line}) == 1
    assert run("raise SystemExit(3)", 1, max_restarts=1)[0] == 3
