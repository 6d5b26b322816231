"""The network interface is the one that leads to rank 0."""

import os
import socket
import subprocess
import sys

import pytest

from atropos_torch_models.network import interface_of, listen, own_address, use_the_way_to

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are named on Linux alone")
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@LINUX
def test_the_way_to_this_machine_is_its_loopback_and_a_user_who_names_another_has_it(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    use_the_way_to("127.0.0.1", 1)
    assert [os.environ.pop(name) for name in VARIABLES] == ["lo", "=lo"]
    monkeypatch.setenv(VARIABLES[0], "mine")
    use_the_way_to("127.0.0.1", 1)
    assert [os.environ.pop(name) for name in VARIABLES] == ["mine", "=lo"]


@LINUX
def test_interfaces_are_found_by_address_as_the_kernel_lists_them():
    listed = subprocess.run(["ip", "-o", "address"], capture_output=True, text=True, check=True).stdout
    found = [
        (line.split()[1], line.split()[3].partition("/")[0]) for line in listed.splitlines() if "secondary" not in line
    ]
    assert ("lo", "127.0.0.1") in found
    for name, address in found:
        assert interface_of(address) == name
    assert interface_of("192.0.2.1") is None


SECOND = """
ip link set lo up && ip address add 10.9.9.1/24 dev lo || exit 77
exec "$0" -c "from atropos_torch_models.network import use_the_way_to; use_the_way_to('10.9.9.1', 1)"
"""


@LINUX
def test_an_address_that_is_no_interfaces_first_is_refused_with_what_to_set():
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", SECOND, sys.executable], capture_output=True, text=True, check=False
    )
    if done.returncode in (1, 77) and "FitError" not in done.stderr:
        pytest.skip(f"this machine makes no namespaces: {done.stderr}")
    assert "has the address 10.9.9.1, by which it reaches 10.9.9.1" in done.stderr
    assert "GLOO_SOCKET_IFNAME" in done.stderr


def test_the_port_is_one_that_is_taken_and_on_that_address_alone():
    with listen("127.0.0.1") as one, listen("127.0.0.1") as other:
        assert one.getsockname()[1] != other.getsockname()[1]
        assert {sock.getsockname()[0] for sock in (one, other)} == {"127.0.0.1"}
        with socket.create_connection(one.getsockname()) as made:
            assert own_address(*made.getpeername()) == "127.0.0.1"
