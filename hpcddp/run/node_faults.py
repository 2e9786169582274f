"""The nodes on which a run has failed: its events note them, and its next requeue can exclude them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from hpcddp.run.events import CONTINUATIONS, Event
from hpcddp.vendors import VENDORS

NodeFault = Literal["lost", "hardware", "failure"]
"""The node was lost; a rank there has reported a hardware error; a rank there was the first to fail."""

EXPIRY_S: Final = 24 * 3600.0
"""For how long a fault of a node counts, in seconds."""
# One failure may have any cause. A second one on the same node makes the node suspect.
_FAULTS_NEEDED: Final[Mapping[NodeFault, int]] = MappingProxyType({"lost": 1, "hardware": 1, "failure": 2})
_WORDS: Final[Mapping[NodeFault, str]] = MappingProxyType(
    {"lost": "was lost", "hardware": "had a hardware error", "failure": "was the first to fail"}
)


def says_hardware_error(text: str) -> bool:
    """Return whether a message names a hardware error of a GPU or of a link between GPUs."""
    lowered = text.lower()
    return any(any(phrase in lowered for phrase in vendor.hardware_errors) for vendor in VENDORS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNode:
    """A node on which a run fails.

    Args:
        name: its name in Slurm.
        why: what has happened there, in words.
        time: when it happened last, in seconds since the epoch.
    """

    name: str
    why: str
    time: float


def failing_nodes(events: Sequence[Event], *, now: float) -> list[FailingNode]:
    """Return the nodes on which a run fails, the one with the newest fault first.

    These are the nodes that were lost, that had a hardware error, or that were twice the first to fail, in the last 24
    hours.

    Args:
        now: seconds since the epoch.
    """
    faults: dict[str, list[tuple[Event, NodeFault]]] = {}
    for event in events:
        if now - event.time < EXPIRY_S:
            for node, fault in _node_faults(event):
                faults.setdefault(node, []).append((event, fault))
    nodes = [
        FailingNode(name=name, why=_describe(faults_of_node), time=faults_of_node[-1][0].time)
        for name, faults_of_node in faults.items()
        if _is_failing([fault for _, fault in faults_of_node])
    ]
    return sorted(nodes, key=lambda node: -node.time)


def _node_faults(event: Event) -> Iterator[tuple[str, NodeFault]]:
    """Yield the nodes that an event notes, with the fault of each."""
    noted = event.facts.get("node_faults")
    if event.kind in CONTINUATIONS and isinstance(noted, dict):
        for fault in _FAULTS_NEEDED:
            for node, word in noted.items():
                if word == fault:
                    yield str(node), fault


def _is_failing(faults: Sequence[NodeFault]) -> bool:
    return any(faults.count(fault) >= needed for fault, needed in _FAULTS_NEEDED.items())


def _describe(faults: Sequence[tuple[Event, NodeFault]]) -> str:
    texts = []
    for fault, words in _WORDS.items():
        attempts = sorted({event.attempt for event, fault_of_event in faults if fault_of_event == fault})
        if attempts:
            noun = "attempt" if len(attempts) == 1 else "attempts"
            texts.append(f"{words} in {noun} {', '.join(map(str, attempts))}")
    return " and ".join(texts)


def excluded_nodes(events: Sequence[Event]) -> list[str]:
    """Return the nodes that hpcddp has excluded from the job of a run; a job that a person submits has none."""
    nodes: list[str] = []
    for event in events:
        if event.kind == "resume":
            nodes = []
        elif event.kind == "exclusion":
            noted = event.facts.get("nodes")
            if isinstance(noted, list):
                nodes = list(map(str, noted))
    return nodes
