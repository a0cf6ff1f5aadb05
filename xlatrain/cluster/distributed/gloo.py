"""gloo, by which the CPU devices of several processes talk, and the address at which it listens."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import jax
from jax.extend import backend


def listen_at(address: str | None) -> None:
    """Let gloo listen at ``address`` where it would take a loopback address; call this before JAX's devices are made.

    gloo takes what the host's own name resolves to. Where ``/etc/hosts`` says that this is a loopback address (Debian's
    127.0.1.1), other hosts do not reach it. A name that has an address in the network keeps it: it may be that of the faster one.

    Args:
        address: this host's, where the others reach it; None: not known, or there are no other hosts.
    """
    if address is None or jax.config.jax_cpu_collectives_implementation != "gloo":  # pyright: ignore[reportAttributeAccessIssue]
        return
    if _is_seen_by_others(socket.gethostname()):
        return
    # JAX makes gloo without an address; what makes the CPU's client can be replaced, by a public function.
    backend.register_backend_factory("cpu", lambda: _client(address), priority=0, fail_quietly=False)


def _client(address: str) -> Any:
    # What JAX's own factory does, in jax 0.10 and 0.11, but for the address.
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed.global_state.client, hostname=address)
    return xla_bridge.make_cpu_client(collectives)


def _is_seen_by_others(name: str) -> bool:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:  # not known at all
        return False
    return not any(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]).is_loopback for entry in found)
