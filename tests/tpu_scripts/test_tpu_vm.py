"""``tpu_scripts/`` for TPU VMs, with a stand-in ``gcloud`` that runs what is for the workers on this machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import gone, wait_for
from tests.tpu_scripts.cloud import PLACE, SCRIPTS, Cloud, shell_scripts

ON_VM = ("create.sh", "setup.sh", "launch.sh", "logs.sh", "status.sh", "stop.sh", "supervise.sh", "delete.sh")


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.end_runs()


def created(cloud: Cloud, *states: str) -> Cloud:
    (cloud.folder / "states").write_text("".join(f"{state}\n" for state in states or ("ACTIVE",)))
    cloud.run("create.sh", *PLACE, "--accelerator-type", "v6e-8", "--no-wait")
    return cloud


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), "-x", *shell_scripts()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ON_VM)
def test_each_script_explains_itself_and_names_a_wrong_option(script: str, cloud: Cloud) -> None:
    said = cloud.run(script, "--help").stdout
    assert f"{script} --name my-tpu --zone us-west4-a" in said
    declared = {
        name
        for line in (SCRIPTS / script).read_text().splitlines()
        if line.startswith("opt_")
        for word in shlex.split(line)
        for name in [word.split("=")[0].removeprefix("opt_").replace("_", "-")]
    }
    assert [name for name in declared if f"--{name}" not in said] == []
    assert "there is no option --nmae" in cloud.run(script, "--nmae", "x", status=2).stderr
    assert "--zone is required" in cloud.run(script, "--name", "x", status=2).stderr
    assert cloud.calls == []


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("create.sh", ("--accelerator-type", "v5litepod16"), "--accelerator-type v5litepod16 is not valid; for example"),
        ("create.sh", ("--accelerator-type", "tpu7x-8"), "Cloud TPU API does not offer tpu7x; run it on GKE"),
        ("create.sh", (), "--accelerator-type is required"),
        ("create.sh", ("--accelerator-type", "v6e-8", "--spot", "--reserved"), "choose one of --spot and --reserved"),
        ("create.sh", ("--spot=yes",), "--spot takes no value"),
        ("create.sh", ("--accelerator-type",), "--accelerator-type needs a value"),
        ("create.sh", ("train.py",), "unexpected argument 'train.py'"),
        ("setup.sh", ("--source", "/nowhere"), "--source /nowhere is no folder"),
        ("setup.sh", ("--requirements", "r.txt"), "--requirements is a file in the folder of --source"),
        ("launch.sh", (), "say what to run"),
        ("launch.sh", ("--env", "A", "--", "x.py"), "--env A is not valid"),
        ("launch.sh", ("--resume-since", "yesterday", "--", "x.py"), "--resume-since yesterday is not valid"),
        ("logs.sh", ("--worker", "first"), "--worker first is not valid"),
        ("supervise.sh", ("--max-restarts", "-1", "--", "x.py"), "--max-restarts -1 is not valid"),
    ],
)
def test_arguments_are_checked(script: str, arguments: tuple[str, ...], said: str, cloud: Cloud) -> None:
    assert said in cloud.run(script, *PLACE, *arguments, status=2).stderr
    assert cloud.calls == []


def test_names_and_zones_are_checked(cloud: Cloud) -> None:
    for place in (
        ("--name", "a;rm", "--zone", "us-west4-a"),
        ("--name", "a", "--zone", "$(id)"),
        ("--name", "A", "--zone", "x-y1-a"),
    ):
        assert "is not valid" in cloud.run("delete.sh", *place, "--yes", status=2).stderr
    assert cloud.calls == []


def test_a_dry_run_prints_every_command_and_runs_none(cloud: Cloud) -> None:
    options = ("--accelerator-type", "v5litepod-16", "--spot", "--project", "my-project", "--delete-at-end", "--dry-run")
    lines = cloud.run("supervise.sh", *PLACE, *options, "--mount", "mount it", "--", "train.py", "--text", "it's").stdout
    assert cloud.calls == []
    first = "gcloud compute tpus queued-resources create my-tpu --zone=us-west4-a --project=my-project --node-id=my-tpu "
    assert lines.startswith(first + "--accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite --spot\n")
    steps = (
        "create my-tpu",
        "describe my-tpu",
        "tpu-vm scp",
        "uv pip install",
        "'--command=mount it'",
        "setsid",
        "delete my-tpu",
    )
    assert [lines.index(step) for step in steps] == sorted(lines.index(step) for step in steps)
    assert lines.endswith("delete my-tpu --zone=us-west4-a --project=my-project --force --quiet\n")
    checked = subprocess.run(["bash", "-n"], input=lines, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr  # one can paste what it prints


def test_create_waits_until_the_tpu_is_there(tmp_path: Path) -> None:
    cloud = Cloud(tmp_path, "ACCEPTED", "ACTIVE")
    done = cloud.run("status.sh", *PLACE, "--wait-until-active", "--poll-seconds", "0")
    assert done.stdout == "ACTIVE\n"
    assert "my-tpu is ACCEPTED; waiting" in done.stderr
    for state, said in (("FAILED", "my-tpu is FAILED and will not"), ("ABSENT", "is ABSENT"), ("UNREACHABLE", "network is down")):
        (tmp_path / "states").write_text(f"{state}\n")
        assert said in cloud.run("create.sh", *PLACE, "--accelerator-type", "v6e-8", "--reserved", status=1).stderr
    assert "--reserved" in cloud.calls[-2]


def test_set_up_launch_logs_and_stop(cloud: Cloud) -> None:
    created(cloud)
    source = cloud.folder / "experiment"
    source.mkdir()
    (source / "requirements.txt").write_text("einops\n")
    (source / "train.py").write_text(
        "import os, sys, time\n"
        "print(sys.argv[1:], os.environ['A'], os.environ['XLATRAIN_RESUME_SINCE'])\n"
        "if sys.argv[1] == 'wait': time.sleep(600)\n"
        "sys.exit(0 if os.environ['WORKER'] == '0' else 7)\n"
    )
    cloud.run("setup.sh", *PLACE, "--source", str(source), "--requirements", "requirements.txt")
    assert cloud.worker(1, "xlatrain/code/train.py").exists()
    assert cloud.worker(1, "xlatrain/source/pyproject.toml").exists()
    installs = (cloud.folder / "installs").read_text()
    assert "uv pip install -q --torch-backend=cpu --python xlatrain/venv ./xlatrain/source[tpu] -r xlatrain/code/req" in installs

    words = ("it's", '$HOME "a  b"; exit 9')
    options = ("--env", "A=1 2,B=3", "--resume-since", "1767225600")
    done = cloud.run("launch.sh", *PLACE, *options, "--", "train.py", *words, status=7)
    for worker in ("worker-0", "worker-1"):
        assert f"[{worker}] {list(words)} 1 2 1767225600" in done.stdout
    assert cloud.run("logs.sh", *PLACE, "--worker", "0", "--lines", "1").stdout.startswith("[worker-0]")
    assert cloud.run("status.sh", *PLACE).stdout == "ACTIVE\nworker-0 ended 0\nworker-1 ended 7\n"

    cloud.run("launch.sh", *PLACE, *options, "--detach", "--", "train.py", "wait")
    assert cloud.run("status.sh", *PLACE).stdout == "ACTIVE\nworker-0 running\nworker-1 running\n"
    assert "a run is going on" in cloud.run("launch.sh", *PLACE, "--detach", "--", "train.py", "2", status=3).stderr
    wait_for(lambda: all("wait" in cloud.worker(worker, "xlatrain/run/log").read_text() for worker in (0, 1)))
    leader = int(cloud.worker(0, "xlatrain/run/pid").read_text())
    programs = psutil.Process(leader).children(recursive=True)
    assert programs
    cloud.run("stop.sh", *PLACE)
    assert cloud.run("status.sh", *PLACE).stdout == "ACTIVE\nworker-0 ended 130\nworker-1 ended 130\n"
    assert "KeyboardInterrupt" in cloud.worker(1, "xlatrain/run/log").read_text()
    assert all(gone(program.pid) for program in programs)


def test_a_run_that_was_killed_is_lost(cloud: Cloud) -> None:
    created(cloud)
    assert cloud.run("status.sh", *PLACE).stdout == "ACTIVE\nworker-0 none\nworker-1 none\n"
    assert "nothing was launched here" in cloud.run("logs.sh", *PLACE, status=3).stderr
    cloud.run("launch.sh", *PLACE, "--detach", "--", "-c", "import time; time.sleep(600)")
    session = psutil.Process(int(cloud.worker(1, "xlatrain/run/pid").read_text()))
    wait_for(lambda: session.children(recursive=True))
    programs = session.children(recursive=True)
    session.kill()
    for program in programs:
        program.kill()
    session.wait(30) if session.ppid() == psutil.Process().pid else psutil.wait_procs([session], 30)
    assert "worker-1 lost" in cloud.run("status.sh", *PLACE).stdout
    assert "ended without a status" in cloud.run("logs.sh", *PLACE, "--worker", "1", status=4).stderr


def test_a_run_whose_status_nobody_asks_for_has_ended(cloud: Cloud) -> None:
    created(cloud)
    ended = subprocess.Popen(["true"], start_new_session=True)
    wait_for(lambda: gone(ended.pid))  # and is not waited for: its parent may be a container's first process, that never does
    for worker in (0, 1):
        run = cloud.worker(worker, "xlatrain/run")
        run.mkdir()
        (run / "pid").write_text(str(ended.pid))
        (run / "log").write_text("the last line\n")
    assert cloud.run("status.sh", *PLACE).stdout == "ACTIVE\nworker-0 lost\nworker-1 lost\n"
    shown = cloud.run("logs.sh", *PLACE, status=4)
    assert "[worker-1] the last line" in shown.stdout
    assert "ended without a status" in shown.stderr
    cloud.run("stop.sh", *PLACE)
    assert not cloud.worker(0, "xlatrain/run/status").exists()  # there was nothing to stop
    assert "[worker-1] again" in cloud.run("launch.sh", *PLACE, "--", "-c", "print('again')").stdout
    ended.wait()


def test_stop_ends_what_a_killed_shell_left(cloud: Cloud) -> None:
    created(cloud)
    cloud.run("launch.sh", *PLACE, "--detach", "--", "-c", "import time; time.sleep(600)")
    session = psutil.Process(int(cloud.worker(0, "xlatrain/run/pid").read_text()))
    wait_for(lambda: session.children(recursive=True))
    programs = session.children(recursive=True)
    session.kill()
    wait_for(lambda: gone(session.pid))
    assert "worker-0 lost" in cloud.run("status.sh", *PLACE).stdout
    assert "a run is going on" in cloud.run("launch.sh", *PLACE, "--detach", "--", "-c", "pass", status=3).stderr
    cloud.run("stop.sh", *PLACE)
    wait_for(lambda: all(gone(program.pid) for program in programs))


def test_supervise_begins_again_after_a_preemption_and_a_failure(tmp_path: Path) -> None:
    states = ("ABSENT", "WAITING_FOR_RESOURCES", "ACTIVE", "UNREACHABLE", "SUSPENDED", "ABSENT", "ACTIVE")
    cloud = Cloud(tmp_path, *states)
    source = tmp_path / "experiment"
    source.mkdir()
    # The TPU's disk is lost with it: what outlives it is outside.
    (source / "train.py").write_text(
        "import os, sys, time\n"
        "attempts = os.path.join(os.environ['CLOUD'], 'attempts-' + os.environ['WORKER'])\n"
        "with open(attempts, 'a') as file: print(os.environ['XLATRAIN_RESUME_SINCE'], file=file)\n"
        "attempt = len(open(attempts).readlines())\n"
        "if attempt == 1: time.sleep(600)\n"  # and is preempted
        "sys.exit(5 if attempt == 2 and os.environ['WORKER'] == '1' else 0)\n"
    )
    options = ("--accelerator-type", "v6e-8", "--spot", "--source", str(source), "--poll-seconds", "0", "--delete-at-end")
    done = cloud.run("supervise.sh", *PLACE, *options, "--mount", "touch mounted", "--", "train.py")
    for said in ("is WAITING_FOR_RESOURCES; waiting", "'look' failed", "is SUSPENDED: asking for another (number 1)"):
        assert said in done.stderr
    assert "the run failed: worker-1 ended 5;" in done.stderr
    assert "the run has ended well" in done.stderr
    asked = [call.split()[3] for call in cloud.calls if call.split()[2] == "queued-resources" and call.split()[3] != "describe"]
    assert asked == ["create", "delete", "create", "delete"]
    assert sum("touch" in call for call in cloud.calls) == 2  # once on each TPU
    attempts = (tmp_path / "attempts-1").read_text().split()
    assert len(attempts) == 3
    assert len(set(attempts)) == 1


def test_supervise_gives_up(tmp_path: Path) -> None:
    cloud = created(Cloud(tmp_path))
    options = ("--accelerator-type", "v6e-8", "--max-restarts", "1", "--poll-seconds", "0")
    done = cloud.run("supervise.sh", *PLACE, *options, "--", "-c", "raise SystemExit(3)", status=1)
    assert "it was started again 1 times; giving up" in done.stderr
    assert "queued-resources delete" not in " ".join(cloud.calls)  # it was not asked to


def test_delete_asks(cloud: Cloud) -> None:
    created(cloud)
    assert "nothing was deleted" in cloud.run("delete.sh", *PLACE, status=1, text="no\n").stderr
    assert not any("delete" in call for call in cloud.calls)
    cloud.run("delete.sh", *PLACE, text="y\n")
    assert cloud.calls[-1] == "compute tpus queued-resources delete my-tpu --zone=us-west4-a --force --quiet"


def test_without_gcloud_it_says_what_to_install(cloud: Cloud) -> None:
    cloud.environment["PATH"] = str(cloud.folder / "bin")
    (cloud.folder / "bin").mkdir()
    for tool in ("bash", "dirname", "sed"):
        (cloud.folder / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    assert "needs gcloud on PATH" in cloud.run("delete.sh", *PLACE, "--yes", status=127).stderr
