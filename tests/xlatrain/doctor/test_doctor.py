"""``xlatrain doctor``: each fault that it knows is made for real where that is possible, and it names the next step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess.pod import ROOT, run
from xlatrain.doctor.accelerators import check_accelerators
from xlatrain.doctor.finding import Finding
from xlatrain.doctor.probe import probe
from xlatrain.doctor.storage import check_storage, examine_storage
from xlatrain.doctor.variables import OURS, check_variables, relevant_variables
from xlatrain.doctor.versions import check_versions, installed_versions

RIGHT = {"platform": "cpu", "devices": [], "collective": {"correct": True, "devices": 8}}


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA"))}
    command = [sys.executable, "-m", "xlatrain.cli", "doctor", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow
def test_this_environment_is_healthy() -> None:
    done = doctor("--json", JAX_PLATFORMS="cpu")
    found = json.loads(done.stdout)
    assert [finding for finding in found["findings"] if finding["level"] == "fault"] == []
    assert (done.returncode, found["healthy"]) == (0, True)
    assert found["versions"]["jax"] == found["versions"]["jaxlib"] is not None
    assert [device["platform"] for device in found["probe"]["devices"]] == ["cpu"] * 8
    assert found["probe"]["collective"]["correct"] is True
    assert found["environment"]["JAX_PLATFORMS"] == "cpu"


@pytest.mark.slow
def test_faults_are_printed_with_the_next_step_and_in_the_exit_status() -> None:
    done = doctor(XLATRAIN_EXECUTOR="fast", XLATRAIN_REPROT="x", XLA_FLAGS="--xla_no_such_flag=1", JAX_PLATFORMS="cpu")
    assert done.returncode == 1
    assert "FAULT JAX: does not start" in done.stdout
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1\n    → take the unknown flags out of XLA_FLAGS" in done.stdout
    assert "FAULT XLATRAIN_EXECUTOR: is 'fast'; expected auto, compiled, eager" in done.stdout
    assert "did you mean XLATRAIN_REPORT?" in done.stdout


def test_a_runtime_that_hangs_is_given_up() -> None:
    found = probe(0.05)
    assert found["timed_out"] is True
    assert "no answer within 0.05 s" in found["error"]


def topics(findings: object) -> list[tuple[str, str]]:
    return [(finding.level, finding.topic) for finding in findings]  # pyright: ignore[reportGeneralTypeIssues]


def install(folder: Path, name: str, version: str) -> None:
    """Leave the metadata of a package behind, as pip does."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_versions_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(check_versions(installed_versions())) == []
    monkeypatch.syspath_prepend(tmp_path)
    for name, version in {
        "jax-cuda12-plugin": "0.4.30",
        "jax-cuda13-plugin": "0.4.30",
        "libtpu": "0.0.1",
        "libtpu-nightly": "0.1",
        "torch-xla": "2.1.0",
        "optax": "0.0.1",
    }.items():
        install(tmp_path, name, version)
    found = list(check_versions(installed_versions()))
    assert set(topics(found)) == {
        ("fault", "optax"),
        ("fault", "jax-cuda12-plugin"),
        ("fault", "jax-cuda13-plugin"),
        ("fault", "jax-cuda-plugin"),
        ("fault", "libtpu"),
        ("warning", "torch-xla"),
    }
    optax = next(finding for finding in found if finding.topic == "optax")
    assert "0.0.1 is installed; xlatrain" in optax.problem
    assert re.fullmatch(r"pip install 'optax>=[\d.]+'", optax.remedy)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, []),
        ({"XLATRAIN_EXECUTOR": "eager", "XLATRAIN_REPORT": "r.json"}, []),
        ({"XLATRAIN_EXECUTOR": "Compiled"}, [("fault", "XLATRAIN_EXECUTOR")]),
        (
            {"XLATRAIN_DEAD_AFTER": "soon", "XLATRAIN_WATCH": "no"},
            [("fault", "XLATRAIN_WATCH"), ("fault", "XLATRAIN_DEAD_AFTER")],
        ),
        ({"XLATRAIN_HANG_AFTER": "0", "XLATRAIN_DEAD_AFTER": "30"}, []),
        ({"XLATRAIN_PROCESSES": "2"}, [("warning", "XLATRAIN_PROCESSES")]),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, [("warning", "WORLD_SIZE")]),
        ({"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "h"}, []),
        ({"XLA_FLAGS": "--xla_dump_to=/tmp"}, [("warning", "XLA_FLAGS")]),
        ({"XLA_FLAGS": "--xla_tpu_scoped_vmem_limit_kib=1"}, [("fault", "XLA_FLAGS")]),
        ({"LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=1"}, []),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, []),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"}, [("warning", "XLA_FLAGS")]),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_NUM_CPU_DEVICES": "4"}, []),
        ({"TPU_LIBRARY_PATH": "/nowhere/libtpu.so"}, [("fault", "TPU_LIBRARY_PATH")]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [("warning", "CUDA_VISIBLE_DEVICES")]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, []),
    ],
)
def test_variables(variables: dict[str, str], expected: list[tuple[str, str]]) -> None:
    assert topics(check_variables(variables)) == expected


@pytest.mark.slow
def test_the_device_count_really_wins_over_xla_flags() -> None:
    """The finding says so; if JAX changes its mind, the finding must change too."""
    found = probe(60, {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_NUM_CPU_DEVICES": "4"})
    assert len(found["devices"]) == 4


def test_secrets_are_not_shown() -> None:
    assert relevant_variables({"TPU_API_KEY": "x", "JAX_PLATFORMS": "cpu", "PATH": "p"}) == {"JAX_PLATFORMS": "cpu"}


def test_every_variable_that_we_read_is_known() -> None:
    """Add a new one to ``OURS`` in xlatrain/doctor/variables.py."""
    sources = [path for package in ("xlatrain", "torch_compat") for path in (ROOT / package).rglob("*.py")]
    used = {name for path in sources for name in re.findall(r"\bXLATRAIN_[A-Z0-9_]*[A-Z0-9]\b", path.read_text())}
    assert used == set(OURS)


@pytest.mark.parametrize(
    ("present", "versions", "environment", "expected"),
    [
        ({"cuda": 2}, {}, {}, ("fault", "pip install 'jax[cuda13]'")),
        ({"tpu": 4}, {}, {}, ("fault", "pip install 'jax[tpu]'")),
        ({"cuda": 2}, {"jax-cuda12-plugin": "0.10.2"}, {}, ("fault", "run `python -c 'import jax; jax.devices()'`")),
        ({"tpu": 4}, {"libtpu": "0.0.42"}, {"JAX_PLATFORMS": "cpu"}, ("warning", "unset JAX_PLATFORMS to use them")),
    ],
)
def test_chips_that_jax_does_not_drive(
    present: dict[str, int], versions: dict[str, str], environment: dict[str, str], expected: tuple[str, str]
) -> None:
    (finding,) = check_accelerators(present, RIGHT, versions, environment)
    assert (finding.level, finding.remedy) == expected


def test_a_wrong_sum_and_a_runtime_that_does_not_start_are_faults() -> None:
    wrong = {**RIGHT, "collective": {"correct": False, "devices": 8}}
    assert topics(check_accelerators({}, wrong, {}, {})) == [("fault", "collective")]
    assert list(check_accelerators({"cuda": 1}, {**RIGHT, "platform": "gpu"}, {}, {})) == []
    (finding,) = check_accelerators({}, {"error": "no"}, {}, {"JAX_PLATFORMS": "tpu,cpu"})
    assert finding == Finding(
        "fault", "JAX", "does not start: no", "JAX_PLATFORMS=tpu,cpu is set: pip install 'jax[tpu]', or unset it"
    )


def test_storage() -> None:
    storage = examine_storage()
    assert set(storage["free_bytes"]) == {"working folder", "temporary files"}
    assert list(check_storage({"free_bytes": {"x": 1 << 40}, "compilation_cache": {"folder": str(ROOT)}})) == []
    found = list(check_storage({"free_bytes": {"x": 1 << 20}, "compilation_cache": None}))
    assert topics(found) == [("warning", "disk"), ("warning", "compilation cache")]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_collective_over_all_processes() -> None:
    done = run(["-m", "xlatrain.cli", "doctor", "--world"], 2, 2)
    assert done.returncode == 0, done.stdout
    for process in (0, 1):
        assert f"[{process}] process {process} of 2, says XLATRAIN_COORDINATOR" in done.stdout
        assert re.search(rf"\[{process}\] sum of 4 MiB over 4 devices: right, [0-9.]+ ms", done.stdout)
    assert "unset XLATRAIN_COORDINATOR" not in done.stdout
