"""Traces of collectives, as torch writes them."""

from __future__ import annotations

import json
from typing import Any


def entry(number: int, **facts: Any) -> dict[str, Any]:
    """Return an entry as torch 2.15 writes it for gloo."""
    return {
        "collective_seq_id": number, "input_dtypes": ["Float"], "input_sizes": [[3]], "is_p2p": False,
        "op_id": number, "output_dtypes": ["Float"], "output_sizes": [[3]], "p2p_seq_id": 0, "pg_id": 0,
        "process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "record_id": number - 1,
        "retired": True, "state": "scheduled", "thread_id": "139814078696320", "thread_name": "python",
        "time_created_ns": 1795361294260992868, "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0, "timeout_ms": 1800000, **facts,
    }  # fmt: skip


def trace(*entries: dict[str, Any]) -> str:
    return json.dumps({"version": "2.10", "entries": entries, "pg_status": {}})
