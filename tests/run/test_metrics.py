"""The lines of ``metrics.jsonl``."""

from __future__ import annotations

from hpcddp.run.metrics import lines_until


def test_lines_up_to_a_step_are_kept_and_damaged_ones_are_dropped() -> None:
    damaged = [
        b"7", b"null", b"\xff", b"[]", b'["val_samples"]', b'"val_samples"', b"{}", b'{"step": "1"}', b'{"step": true}',
        b"[" * 100_000, b"1" * 10_000, b"",
    ]  # fmt: skip
    steps = [b'{"step": 1, "loss": 0.5}', b'{"step": 1, "val_samples": 3}', b'{"step": 2, "val_samples": 3}']
    content = b"\n".join([*damaged, *steps, b'{"step": 3}', b'{"step": 2'])
    assert lines_until(content, step=2, evaluated_step=1) == b"\n".join(steps[:2]) + b"\n"
    assert lines_until(b"", step=2, evaluated_step=1) == b""
