"""Two hosts on one machine: network namespaces joined by a cable. Needs root."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

TRAINER, GENERATOR = "10.77.0.1", "10.77.0.2"
IP_S = 30


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces and of the trainer's end of the cable; no other network is in them."""

    trainer: str
    generator: str
    interface: str

    @contextmanager
    def lost_interface(self) -> Iterator[None]:
        """Take the trainer's interface down, and up again at the end."""
        ip("-n", self.trainer, "link", "set", self.interface, "down")
        try:
            yield
        finally:
            ip("-n", self.trainer, "link", "set", self.interface, "up")


def possible() -> bool:
    return os.getuid() == 0 and shutil.which("ip") is not None


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    names = [f"draftsmith-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"ds{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, (TRAINER, GENERATOR), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield Hosts(names[0], names[1], ends[0])
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=IP_S, stderr=subprocess.DEVNULL)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=IP_S)


def on(host: str | None, command: list[str]) -> list[str]:
    """The command, to be run on one of the hosts, or here where None."""
    return command if host is None else ["ip", "netns", "exec", host, *command]
