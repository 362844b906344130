"""Ports for servers that bind late: never one that somebody listens on or has reserved."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from infra.network import ports


def test_a_reserved_port_is_nobody_else_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    three = ports.lasting_ports(3)
    monkeypatch.setattr(ports.tempfile, "gettempdir", lambda: str(tmp_path))  # other tests reserve ports, too
    monkeypatch.setattr(ports.random, "sample", lambda _ports, _count: three)
    with socket.socket() as taken:
        taken.bind((ports.HOST, three[0]))
        taken.listen()
        with ports.reserved_port() as (first, lock), ports.reserved_port() as (second, _):
            assert (first, second) == (three[1], three[2])
            assert lock.path.name == str(first)
    with ports.reserved_port() as (again, _):
        assert again == three[0]


def test_none_left() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports.random, "sample", lambda _ports, _count: [])
        with pytest.raises(ValueError, match=r"no free port in 21000\.\.28999"), ports.reserved_port():
            pass


def test_who_listens() -> None:
    with socket.socket() as mine:
        mine.bind((ports.HOST, 0))
        port = mine.getsockname()[1]
        assert not ports.is_foreign(port, list)
        mine.listen()
        assert not ports.is_foreign(port, lambda: [1, os.getpid()])
        assert ports.is_foreign(port, lambda: [os.getppid(), 2**30])


def test_processes_are_asked_for_after_somebody_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that started and listened between the two would be a stranger."""
    listed, order = psutil.net_connections, list[str]()

    def look(kind: str) -> object:
        order.append("looked")
        return listed(kind)

    def ask() -> list[int]:
        order.append("asked")
        return [os.getpid()]

    monkeypatch.setattr(psutil, "net_connections", look)
    with socket.socket() as mine:
        mine.bind((ports.HOST, 0))
        mine.listen()
        assert not ports.is_foreign(mine.getsockname()[1], ask)
    assert order == ["looked", "asked"]


def test_the_next_free_port_is_taken_and_said() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        usual = holder.getsockname()[1]
        taken: set[int] = set()
        first, note = ports.free_port("--prefect-port", None, usual, taken)
        assert usual < first < usual + ports.PORTS_TRIED
        assert str(usual) in note
        second, _ = ports.free_port("--mlflow-port", None, usual, taken)
        assert second > first
        with pytest.raises(ValueError, match=f"--mlflow-port {first} is taken"):
            ports.free_port("--mlflow-port", first, usual, taken)


def test_a_machine_s_address_is_the_one_that_is_set() -> None:
    assert ports.machine_address("10.1.2.3") == "10.1.2.3"


@pytest.mark.parametrize("foreign", ["192.0.2.1", "::1"])
def test_a_server_cannot_listen_at_an_address_of_another_machine(foreign: str) -> None:
    assert ports.listening_address("127.0.0.1") == "127.0.0.1"
    assert ports.listening_address("localhost") == "localhost"
    with pytest.raises(ValueError, match=rf"transport.address={re.escape(foreign)} is no IPv4 address of this machine"):
        ports.listening_address(foreign)


def test_a_host_name_that_is_loopback_here_is_no_address_for_others() -> None:
    """Debian's /etc/hosts gives a machine's own name 127.0.1.1; here it is another spelling that is resolved."""
    with pytest.raises(ValueError, match=r"transport.address=127.1.257 is 127.1.1.1 on this machine, where no other"):
        ports.listening_address("127.1.257")


ALONE = """
import sys
from infra.network.ports import machine_address
try:
    print(machine_address("auto"))
except ValueError as refusal:
    print(f"refused: {refusal}")
"""
NONE = "refused: transport.address=auto"
WITH_A_ROUTE = (
    "ip link set lo up && ip link add out type veth peer name back && ip addr add 10.77.0.9/24 dev out && "
    "ip link set out up && ip link set back up && ip route add default via 10.77.0.1 && exec "
)


@pytest.mark.parametrize(("before", "said"), [("exec ", NONE), (WITH_A_ROUTE, "10.77.0.9")])
def test_auto_is_the_address_of_the_default_route(before: str, said: str, own_namespaces: None) -> None:
    """In a network namespace of its own, first without any network."""
    if before == WITH_A_ROUTE and shutil.which("ip") is None:
        before, said = "exec ", NONE
    alone = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    python = shlex.join([sys.executable, "-c", ALONE])
    done = subprocess.run([*alone, before + python], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(said)
