"""`python -m deployments.leave`: the right node, or none."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from ray.core.generated import gcs_pb2

from deployments.leave import CannotLeave, address_towards, drain_request, main, node_at


@dataclass
class Node:
    node_manager_address: str
    node_id: bytes = b"\x01"
    state: int = gcs_pb2.GcsNodeInfo.ALIVE
    is_head_node: bool = False


HEAD = Node("10.0.0.1", is_head_node=True)
OLD = Node("10.0.0.2", b"\x02", gcs_pb2.GcsNodeInfo.DEAD)
WORKER = Node("10.0.0.2", b"\x03")
OTHER = Node("10.0.0.3", b"\x04")


def test_the_living_node_with_the_address_leaves() -> None:
    assert node_at("10.0.0.2", [HEAD, OLD, WORKER, OTHER]) is WORKER


def test_the_head_never_leaves() -> None:
    with pytest.raises(CannotLeave, match=r"10\.0\.0\.1 is the head"):
        node_at("10.0.0.1", [HEAD, WORKER])


def test_a_node_that_ray_does_not_know_does_not_take_another() -> None:
    with pytest.raises(CannotLeave, match="no living Ray node"):
        node_at("10.0.0.2", [HEAD, OLD, OTHER])


def test_the_deadline_is_in_milliseconds_from_now() -> None:
    assert drain_request(120)[2] - drain_request(0)[2] == pytest.approx(120_000, abs=1000)


def test_the_address_towards_the_head() -> None:
    assert address_towards("127.0.0.1:6379") == "127.0.0.1"


@pytest.mark.parametrize("address", ["", "head", "127.0.0.1:port"])
def test_a_wrong_address_of_the_head_is_named(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["5"]) == 1
    assert f"RAY_ADDRESS is {address!r}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["x"], ["-1"], ["1", "2"]])
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage:" in capsys.readouterr().err
