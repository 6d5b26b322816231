"""Choose the network interface between ranks: on machines with several, gloo and NCCL may guess wrong."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from atropos_core.errors import FitError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface
_NAMED_BY = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}  # NCCL takes a bare name for a beginning


def use_the_way_to(host: str, port: int) -> None:
    """Make gloo and NCCL use the interface that leads to this address, unless the environment names one. Raises FitError if no
    interface has this machine's address on that way."""
    if sys.platform != "linux" or all(name in os.environ for name in _NAMED_BY):
        return
    own = own_address(host, port)
    name = interface_of(own)
    if name is None:
        raise FitError(
            f"no network interface of {socket.gethostname()} has the address {own}, by which it reaches {host}.",
            remedy="Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the name of the one that ranks are to use.",
        )
    for variable, text in _NAMED_BY.items():
        os.environ.setdefault(variable, text.format(name))


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the way to another one. Nothing is sent."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines())
        return next((fields[-1] for fields in lines if fields[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None


def listen(host: str) -> socket.socket:
    """Listen at a port chosen by the system, so that no other process can take it. Raises OSError."""
    return socket.create_server((host, 0), family=_family(host))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
