"""Which signals two traces define differently, also when one of them was read from a log long ago."""

from __future__ import annotations

import json
from pathlib import Path

from moeproxy.traces import LogTrace, RunInfo, Trace, overlay_notes, read


def _log(path: Path) -> LogTrace:
    rows = [{"step": step, "actor/pg_loss": 0.5, "actor/entropy": 1.0} for step in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (log,) = read(path)
    return log


def test_a_trace_that_was_saved_from_a_log_keeps_its_definitions(tmp_path: Path) -> None:
    log = _log(tmp_path / "x.jsonl")
    saved = Trace.load(log.trace.save(tmp_path / "x.parquet"))
    lab = Trace(log.trace.steps, None, RunInfo(model="m", method="original", n_experts=8, seed=0))
    assert overlay_notes(log, saved) == overlay_notes(saved, log) == ()
    (note,) = overlay_notes(lab, saved)
    assert note.startswith("policy_loss: as moeproxy defines it; the other: verl, mean over the update's micro-batches")
    assert overlay_notes(lab, lab) == ()
