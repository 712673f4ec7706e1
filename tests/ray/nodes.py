"""Nodes of a Ray cluster on one machine, each in a network namespace: its own address, its own ports, its own cable to pull.

    bridge (this machine, .1) --+-- namespace (.2): ray start --head
                                +-- namespace (.3): ray start --address ...

What one node tells another to connect to must be right here: 127.0.0.1 leads nowhere. Nodes share the file system and the process table.
Needs root, and `ip` and `ss` of iproute2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ray.commands import tool

END_TIMEOUT_S = 10.0


class NoNetwork(Exception):
    """This machine gives us no namespaces."""


@dataclass(frozen=True)
class Node:
    """One namespace, and the `ray start --block` in it. cable: this machine's end of its link."""

    namespace: str
    address: str
    cable: str
    process: subprocess.Popen[bytes]

    def pids(self) -> list[int]:
        """Every process on the node."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def lose_power(self) -> None:
        """All processes die at once. Their connections are closed, so whoever has one is told."""
        while pids := self.pids():  # again: one may have started another meanwhile
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pull_cable(self) -> None:
        """Nothing dies, but nothing comes or goes any more, and nobody is told."""
        ip("link", "set", self.cable, "down")

    def remove(self) -> None:
        """Leave nothing."""
        self.lose_power()
        self.process.wait(END_TIMEOUT_S)
        ip("link", "delete", self.cable)  # by itself it goes only with the last connection that the kernel remembers
        ip("netns", "delete", self.namespace)


class Cluster:
    """Nodes at one bridge. folder: for Ray's sockets and logs; short, because paths of sockets may have 107 characters."""

    def __init__(self, folder: Path, subnet: str, env: dict[str, str]) -> None:
        self._folder = folder
        self._subnet = subnet
        self._env = env
        self._name = f"ovl{os.getpid()}"
        self._numbers = itertools.count(2)
        self.nodes: list[Node] = []
        ip("link", "add", self._name, "type", "bridge")
        ip("address", "add", f"{subnet}.1/24", "dev", self._name)
        ip("link", "set", self._name, "up")

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def start(self, *arguments: str, num_cpus: int) -> Node:
        """The first is the head. arguments: more of `ray start`. Returns before the node has joined."""
        number = next(self._numbers)
        namespace, cable = f"{self._name}-{number}", f"{self._name}-{number}"
        self._lay(namespace, cable, f"{self._subnet}.{number}")
        role = ["--head", "--port=6379", "--dashboard-host=0.0.0.0"]
        if self.nodes:
            role = [f"--address={self.head.address}:6379"]
        command = [
            *(tool("ray"), "start", "--block", *role, f"--num-cpus={num_cpus}", "--object-store-memory=80000000"),
            *("--disable-usage-stats", f"--temp-dir={self._folder / str(number)}", *arguments),
        ]
        with (self._folder / f"{number}.log").open("wb") as log:
            command = ["ip", "netns", "exec", namespace, *command]
            process = subprocess.Popen(command, env=self._env, stdout=log, stderr=log, start_new_session=True)
        self.nodes.append(Node(namespace, f"{self._subnet}.{number}", cable, process))
        return self.nodes[-1]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.remove()
        ip("link", "delete", self._name)

    def _lay(self, namespace: str, cable: str, address: str) -> None:
        """A namespace with one address, and a cable from there to the bridge."""
        ip("netns", "add", namespace)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", cable, "master", self._name, "up")
        for command in (
            ("address", "add", f"{address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            # Ray finds a node's address by the node's route to the world.
            ("route", "add", "default", "via", f"{self._subnet}.1"),
        ):
            ip("-netns", namespace, *command)


@contextmanager
def cluster(folder: Path, env: dict[str, str]) -> Iterator[Cluster]:
    """Raises NoNetwork where namespaces cannot be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NoNetwork("network namespaces need root and the command `ip`")
    try:
        made = Cluster(folder, f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}", env)
    except subprocess.CalledProcessError as error:
        raise NoNetwork(f"no network of our own: {error.stderr.decode().strip()}") from error
    try:
        yield made
    finally:
        made.close()


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10).stdout.decode()
