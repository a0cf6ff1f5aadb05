"""``tpu_scripts/`` for GKE and SLURM, and what ``xlatrain launch --print`` prints, with stand-ins that record or run it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.tpu_scripts.cloud import Cloud
from tests.tpu_scripts.jobset_fields import faults
from xlatrain.cli import main
from xlatrain.cluster.cluster_templates import jobset

PYTHON = ("--python", sys.executable)
ON_GKE = ("--name", "my-run", "--image", "registry/image:1", "--accelerator", "v5e", "--topology", "4x4")


@pytest.fixture
def cloud(tmp_path: Path) -> Cloud:
    return Cloud(tmp_path)


def test_gke_submits_a_jobset(cloud: Cloud) -> None:
    cloud.run(
        "gke.sh", *ON_GKE, *PYTHON, "--slices", "2", "--namespace", "team", "--", "-m", "torch_compat", "train.py", "--x", "it's"
    )
    assert cloud.calls == ["--namespace=team apply --filename=-"]
    manifest = yaml.safe_load((cloud.folder / "applied").read_text())
    assert faults(manifest) == []
    assert manifest["metadata"]["name"] == "my-run"
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 3}
    [job] = manifest["spec"]["replicatedJobs"]
    assert job["replicas"] == 2
    spec = job["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (4, 4, 0)  # hosts of 16 chips
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    [container] = pod["containers"]
    assert container["command"] == ["python3", "-m", "torch_compat", "train.py", "--x", "it's"]
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert [variable["name"] for variable in container["env"]] == ["PYTHONUNBUFFERED", "XLATRAIN_RESUME_SINCE"]

    cloud.run("gke.sh", "--name", "my-run", "--logs")
    cloud.run("gke.sh", "--name", "my-run", "--delete")
    assert "logs --follow" in cloud.calls[-2]
    assert cloud.calls[-1] == "delete jobset my-run"


def test_manifests_are_what_the_jobset_api_knows() -> None:
    for accelerator, topology, slices in (("v5e", "1x1", 1), ("v5e", "16x16", 1), ("v5p", "8x8x16", 1000), ("tpu7x", "2x2x1", 2)):
        text = jobset(
            "a" * 40, "registry/image:1", accelerator, topology, ["x.py", "1"], slices=slices, variables={"N": "1", "YES": "true"}
        )
        assert faults(yaml.safe_load(text)) == []  # numbers and words among the variables stay texts
    broken = yaml.safe_load(text.replace("completions", "completion"))
    assert faults(broken) == [".spec.replicatedJobs[0].template.spec.completion: no such field"]
    broken = yaml.safe_load(text.replace("'1'", "1"))
    assert [fault.rpartition(".")[2] for fault in faults(broken)] == ["command[2]: 1", "value: 1", "value: 1"]
    assert "pods would be named" in faults(yaml.safe_load(text.replace("a" * 40, "a" * 50)))[0]


def test_gke_dry_run_and_wrong_arguments(cloud: Cloud) -> None:
    printed = cloud.run("gke.sh", *ON_GKE, *PYTHON, "--dry-run", "--", "train.py").stdout
    assert "kind: JobSet" in printed
    assert printed.endswith("kubectl apply --filename=-\n")
    for arguments, said in (
        (("--topology", "16", "--", "x.py"), "--topology 16 is not valid"),
        (("--chips-per-host", "3", *PYTHON, "--", "x.py"), "the 16 chips of 4x4 do not divide among hosts of 3"),
        (("--logs", "--delete"), "choose one of"),
        ((), "say what to run"),
    ):
        assert said in cloud.run("gke.sh", *ON_GKE, *arguments, status=2).stderr
    assert cloud.calls == []


def test_slurm_queues_a_failed_run_again(cloud: Cloud) -> None:
    (cloud.folder / "train.py").write_text(
        "import os; print(os.environ['XLATRAIN_RESUME_SINCE'], file=open('starts', 'a')); raise SystemExit(5)"
    )
    options = ("--name", "my-run", "--nodes", "2", "--gpus-per-node", "8", "--time", "1-00:00:00", "--max-restarts", "2")
    cloud.run("slurm.sh", *options, *PYTHON, "--", "train.py", status=5)
    starts = (cloud.folder / "starts").read_text().split()
    assert len(starts) == 3
    assert len(set(starts)) == 1
    job = (cloud.folder / "job").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1-00:00:00", "--requeue"):
        assert f"#SBATCH {line}\n" in job
    shellcheck = Path(sys.executable).with_name("shellcheck")
    subprocess.run([str(shellcheck), str(cloud.folder / "job")], check=True)
    (cloud.folder / "calls").unlink()
    assert "#SBATCH --nodes=1" in cloud.run("slurm.sh", "--name", "a", "--nodes", "1", *PYTHON, "--dry-run", "--", "x.py").stdout
    assert cloud.calls == []


@pytest.mark.parametrize("script", ["gke.sh", "slurm.sh"])
def test_help(script: str, cloud: Cloud) -> None:
    assert f"{script} --name my-run" in cloud.run(script, "--help").stdout


def test_printed_gcloud_and_ssh_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--print", "gcloud", "--name", "t", "--zone", "us-west4-a", "train.py", "it's"]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:-1] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "t", "--zone=us-west4-a", "--worker=all"]
    remote = shlex.split(words[-1].removeprefix("--command="))
    assert remote == ["cd", "xlatrain/code", "&&", "env", "PYTHONUNBUFFERED=1", "../venv/bin/python", "train.py", "it's"]
    assert (
        main(
            [
                "launch",
                "--print",
                "ssh",
                "--hosts",
                "a,me@b",
                "--directory",
                "/shared dir",
                "--env",
                "A=1",
                "--dead-after",
                "20",
                "train.py",
            ]
        )
        == 0
    )
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[-2] for line in lines] == ["a", "me@b"]
    for i, line in enumerate(lines):
        remote = shlex.split(line[-1])
        assert remote[:3] == ["cd", "/shared dir", "&&"]
        assert {
            "A=1",
            "XLATRAIN_DEAD_AFTER=20",
            "XLATRAIN_COORDINATOR=a:8476",
            "XLATRAIN_PROCESSES=2",
            f"XLATRAIN_PROCESS_ID={i}",
        } <= set(remote)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("train.py",), "this machine needs --processes"),
        (("--hosts", "a,b", "-n", "2", "train.py"), "--processes does nothing here (ssh): it is for this machine"),
        (("--hosts", "a,,b", "train.py"), "'' is not a host"),
        (("--hosts=-oProxyCommand=x", "train.py"), "'-oProxyCommand=x' is not a host"),
        (("--print", "gcloud", "--name", "t", "train.py"), "gcloud needs --zone"),
        (
            ("--print", "slurm", "--nodes", "2", "--zone", "z", "train.py"),
            "--zone does nothing here (slurm): it is for --print gcloud",
        ),
        (("--print", "ssh", "--hosts", "a", "--max-restarts", "1", "train.py"), "printed commands run once"),
        (("--print", "slurm", "--nodes", "2", "--partition", "a b", "train.py"), "partition must not hold spaces"),
        (("-n", "2", "--env", "A", "train.py"), "--env takes NAME=VALUE"),
        (("-n", "2", "--max-restarts", "-1", "train.py"), "max_restarts must be at least 0, not -1"),
    ],
)
def test_launch_refuses(options: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *options]) == 2
    assert said in capsys.readouterr().err
