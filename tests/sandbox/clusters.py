"""Clusters that a sandbox would start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcddp.sandbox.configuration import Cluster, Node


def cluster(**changes: Any) -> Cluster:
    fields: dict[str, Any] = {
        "directory": Path("/somewhere/sandbox"),
        "user": "root",
        "controller_host": "ctl",
        "controller_address": "198.18.7.1",
        "controller_port": 6817,
        "node_host": None,
        "nodes": (
            Node(name="n1", address="198.18.7.11", port=6818),
            Node(name="n2", address="198.18.7.12", port=6818),
        ),
        "cpus_per_node": 8,
        "gpus_per_node": 2,
    }
    return Cluster(**{**fields, **changes})


SHARED = cluster(
    user="ann",
    controller_host="laptop",
    controller_address="127.0.0.1",
    controller_port=10_100,
    node_host="laptop",
    nodes=(Node(name="n1", address="127.0.0.1", port=10_101), Node(name="n2", address="127.0.0.1", port=10_102)),
    gpus_per_node=0,
    overrides={"AuthInfo": "cred_expire=5", "killwait": "3", "DebugFlags": "Steps"},
)
