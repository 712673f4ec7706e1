"""Which connections NetworkPolicies allow, by Kubernetes' rules for ingress (no plugin, no cluster)."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """Who connects: a pod (labels, in the namespace of the policies or another), or an address outside the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    own_namespace: bool = False
    address: str | None = None


def allowed(policies: Sequence[Any], target: dict[str, str], source: Source, port: int) -> bool:
    """Whether `source` may open a TCP connection to `port` of a pod with the labels `target`."""
    chosen = [
        policy["spec"]
        for policy in policies
        if matches(policy["spec"]["podSelector"], target)
        and "Ingress" in policy["spec"].get("policyTypes", ["Ingress"])
    ]
    if not chosen:
        return True
    return any(
        has_port(rule, port) and comes_from(rule, source) for policy in chosen for rule in policy.get("ingress") or []
    )


def has_port(rule: Any, port: int) -> bool:
    ports = (rule or {}).get("ports")
    return not ports or any(
        entry.get("protocol", "TCP") == "TCP"
        and ("port" not in entry or entry["port"] <= port <= entry.get("endPort", entry["port"]))
        for entry in ports
    )


def comes_from(rule: Any, source: Source) -> bool:
    peers = (rule or {}).get("from")
    return not peers or any(is_peer(peer, source) for peer in peers)


def is_peer(peer: Any, source: Source) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        return source.address is not None and (
            inside(source.address, block["cidr"])
            and not any(inside(source.address, no) for no in block.get("except", []))
        )
    if source.address is not None:
        return False
    if "namespaceSelector" not in peer and not source.own_namespace:
        return False
    assert not peer.get("namespaceSelector"), "only the empty selector, all namespaces, is understood here"
    return matches(peer.get("podSelector", {}), source.labels)


def inside(address: str, cidr: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(cidr)


def matches(selector: Any, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, selector
    wanted: dict[str, str] = selector.get("matchLabels", {})
    return wanted.items() <= labels.items()
