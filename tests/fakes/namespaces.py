"""Two network namespaces of this machine with a cable between them, whose packets can be dropped silently."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NOWHERE = "02:00:00:00:00:99"
"""A hardware address that no device has: what is sent there is lost without a word."""


def is_permitted() -> bool:
    """Return whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"octavo-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    cable = ["ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1"]
    is_cabled = subprocess.run(cable, capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], check=False)
    return is_cabled


class Namespaces:
    """Namespace 0 has the first of `addresses`, namespace 1 the second."""

    def __init__(self) -> None:
        self.names = tuple(f"octavo-{os.getpid()}-{number}" for number in range(2))
        self.addresses = ("10.201.0.1", "10.201.0.2")
        self._hardware: list[str] = []

    def command(self, number: int, words: list[str]) -> list[str]:
        """Return the command that runs another in a namespace."""
        return ["ip", "netns", "exec", self.names[number], *words]

    def partition(self) -> None:
        """Drop every packet between the namespaces from now on; either side notices only that nothing comes."""
        for number in range(2):
            self._neighbour(number, NOWHERE)

    def heal(self) -> None:
        for number in range(2):
            self._neighbour(number, self._hardware[1 - number])

    def _neighbour(self, number: int, hardware: str) -> None:
        other = self.addresses[1 - number]
        self._ip(
            "-n", self.names[number], "neigh", "replace", other, "lladdr", hardware, "nud", "permanent", "dev", "eth0"
        )

    def _open(self) -> None:
        for name in self.names:
            self._ip("netns", "add", name)
        first, second = self.names
        self._ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                self._ip("-n", name, "link", "set", device, "up")
            shown = self._ip("-n", name, "-o", "link", "show", "eth0")
            self._hardware.append(shown.partition("link/ether ")[2].split()[0])

    def _close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    @staticmethod
    def _ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Two namespaces that are gone after the block."""
    made = Namespaces()
    try:
        made._open()
        yield made
    finally:
        made._close()
