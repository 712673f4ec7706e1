"""`python -m deployments.leave SECONDS`: tells the Ray cluster that this node goes within SECONDS. The preStop hook of the pods in k8s/.

Serve then starts replacements of what runs here on other nodes and drains it; when nothing is left, the raylet ends. Returns then (`ray
start --block` would stay), so that the pod need not wait longer than its requests; at the latest a little after SECONDS.

`ray drain-node` would do, but without a node id it takes the node that its driver happens to connect to, which can be the head (seen on
Ray 2.60). So the node is found by the address that this machine has towards the head, and the head is never it. RAY_ADDRESS, which
KubeRay sets in every pod, says where the head is.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ray._raylet import GcsClient  # type: ignore[attr-defined]  # in Cython; the stub lacks it
from ray.core.generated import autoscaler_pb2, gcs_pb2

RPC_TIMEOUT_S = 10.0
POLL_S = 1.0
MARGIN_S = 10  # after the deadline, for Serve's last kills


class CannotLeave(Exception):
    """The message says why."""


class NodeInfo(Protocol):
    """What is read of Ray's GcsNodeInfo."""

    node_id: bytes
    node_manager_address: str
    state: int
    is_head_node: bool


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or not arguments[0].isdigit():
        print(f"usage: python -m deployments.leave SECONDS, given: {list(arguments)}", file=sys.stderr)
        return 2
    try:
        leave(os.environ.get("RAY_ADDRESS", ""), int(arguments[0]))
    except CannotLeave as reason:
        print(f"this node cannot leave: {reason}", file=sys.stderr)
        return 1
    return 0


def leave(head: str, within_s: int) -> None:
    """head: host:port of the GCS. Returns when the node has left or the time is over. Raises CannotLeave."""
    own = address_towards(head)
    end = time.monotonic() + within_s + MARGIN_S
    try:
        client = GcsClient(address=head)
        node = node_at(own, client.get_all_node_info(timeout=RPC_TIMEOUT_S).values())
        accepted, reason = client.drain_node(node.node_id.hex(), *drain_request(within_s))
        if not accepted:
            raise CannotLeave(f"Ray refuses: {reason}")
        while is_alive(node.node_id, client.get_all_node_info(timeout=RPC_TIMEOUT_S).values()):
            if time.monotonic() > end:
                return
            time.sleep(POLL_S)
    except RuntimeError as error:  # what Ray's client raises when the head is gone
        raise CannotLeave(f"the head at {head} does not answer: {error}") from None


def drain_request(within_s: int) -> tuple[Any, str, int]:
    """Reason, text and deadline (ms since 1970). For PREEMPTION Ray never refuses, and Serve stops what has no replacement in time."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return reason, "the pod is being deleted", (time.time_ns() // 1_000_000) + within_s * 1000


def address_towards(head: str) -> str:
    """This machine's address on the way to the head: the one that Ray knows it by. Sends nothing. Raises CannotLeave."""
    host, _, port = head.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except (OSError, ValueError):
        raise CannotLeave(f"RAY_ADDRESS is {head!r}, not host:port of a head that can be reached") from None


def is_alive(node_id: bytes, nodes: Iterable[NodeInfo]) -> bool:
    return any(one.node_id == node_id and one.state == gcs_pb2.GcsNodeInfo.ALIVE for one in nodes)


def node_at(address: str, nodes: Iterable[NodeInfo]) -> NodeInfo:
    """The living worker node with this address. Raises CannotLeave."""
    alive = [one for one in nodes if one.node_manager_address == address and one.state == gcs_pb2.GcsNodeInfo.ALIVE]
    if not alive:
        raise CannotLeave(f"no living Ray node has the address {address}")
    if any(one.is_head_node for one in alive) or len(alive) > 1:
        raise CannotLeave(f"the Ray node at {address} is the head, or not alone there")
    return alive[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
