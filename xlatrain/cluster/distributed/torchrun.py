"""Where the processes of a torchrun agent meet: process 0 chooses, and says so in the agent's store."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import timedelta

from xlatrain.cluster.launch import free_port

_KEY = "xlatrain/coordinator"


def has_agent_store(environment: Mapping[str, str]) -> bool:
    """Whether the agent itself listens at ``MASTER_ADDR:MASTER_PORT``, with the store that all its processes may ask."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agreed_address(store_address: str, process_id: int, timeout: float) -> str:
    """The ``host:port`` at which process 0 will listen.

    No port beside ``MASTER_PORT`` is known to be free, and the agent with the store need not be on process 0's host: process 0
    takes a free port of its own host and writes it into the store, where the others wait for it. A restart of the workers
    agrees anew.

    Raises:
        torch.distributed.DistStoreError: nothing was written within ``timeout`` seconds.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html (environment variables),
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.TCPStore
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] # torchrun: torch is there

    host, _, port = store_address.rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timedelta(seconds=timeout))
    key = "/".join((_KEY, os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    if process_id == 0:
        store.set(key, f"{_own_host(host, int(port))}:{free_port()}")
    return store.get(key).decode()


def _own_host(host: str, port: int) -> str:
    """This host's address as the store's host sees it; ``host`` itself where both are one machine."""
    with socket.create_connection((host.strip("[]"), port)) as connection:
        mine, theirs = connection.getsockname()[0], connection.getpeername()[0]
    if mine == theirs:
        return host
    return f"[{mine}]" if ":" in mine else mine
