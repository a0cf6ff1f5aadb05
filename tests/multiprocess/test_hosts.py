"""Two hosts, in network namespaces, whose names are loopback addresses in their own ``/etc/hosts``, as Debian writes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from xlatrain.cluster.launch import COORDINATOR, PROCESS_ID, PROCESSES

pytestmark = pytest.mark.multiprocess

SUM = """
import numpy as np
from jax.experimental import multihost_utils
from xlatrain.cluster import distributed
here = distributed.initialize().process_id
print("sum", multihost_utils.process_allgather(np.array([here + 1.0])).sum())
"""

Start = Callable[[int, int, int], "subprocess.Popen[str]"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process of a world on one of two hosts: ``start(host, process, processes)``. Skips where hosts cannot be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs iproute2's `ip` and util-linux's `unshare`")
    spaces = [f"xl{os.getpid()}n{i}" for i in range(2)]  # of an interface's name 15 characters are taken
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
            ip("-n", spaces[0], "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", spaces[1])
            for i, space in enumerate(spaces):
                ip("-n", space, "addr", "add", f"10.9.0.{i + 1}/24", "dev", f"v{i}")
                ip("-n", space, "link", "set", "lo", "up")
                ip("-n", space, "link", "set", f"v{i}", "up")
                names = ["127.0.0.1 localhost", *(f"{'127.0.1.1' if i == k else f'10.9.0.{k + 1}'} node{k}" for k in range(2))]
                (tmp_path / f"hosts{i}").write_text("\n".join(names) + "\n")
            subprocess.run(in_space(spaces[0], 0, tmp_path, ["true"]), check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces, which this machine does not allow: {error.stderr!r}")

        def begin(host: int, process: int, processes: int) -> subprocess.Popen[str]:
            place = {COORDINATOR: "node0:8476", PROCESSES: str(processes), PROCESS_ID: str(process)}
            environment = {**os.environ, **place, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
            command = in_space(spaces[host], host, tmp_path, [sys.executable, "-c", SUM])
            return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        yield begin
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def in_space(space: str, host: int, folder: Path, command: list[str]) -> list[str]:
    """``command`` on that host, under its name and with its file of names."""
    prepare = f'hostname node{host} && mount --bind "$0" /etc/hosts && exec "$@"'
    return [
        "ip",
        "netns",
        "exec",
        space,
        "unshare",
        "--uts",
        "--mount",
        "sh",
        "-c",
        prepare,
        str(folder / f"hosts{host}"),
        *command,
    ]


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1)], ids=["one each", "two on the first"])
def test_hosts_whose_own_names_are_loopback_addresses(start: Start, hosts: tuple[int, ...]) -> None:
    processes = [start(host, index, len(hosts)) for index, host in enumerate(hosts)]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert f"sum {sum(range(1, len(hosts) + 1)):.1f}" in output
