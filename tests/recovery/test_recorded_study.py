"""The recorded comparison of strategies: its page shows its own numbers, and the papers' order holds."""

from __future__ import annotations

from moeproxy.places import data_dir
from moeproxy.recovery.calculator import NONE, ROLE, TASK
from moeproxy.recovery.study import FREQUENCIES, Study

RECORDED = data_dir() / "recovery"


def test_the_page_shows_the_recorded_numbers() -> None:
    study = Study.load(RECORDED / "study.json")
    assert study.table() in (RECORDED / "README.md").read_text(encoding="utf-8")


def test_every_job_finished_equal_bit_for_bit_and_the_papers_order_holds() -> None:
    rows = Study.load(RECORDED / "study.json").rows
    seeds = {row.seed for row in rows}
    assert len(seeds) > 1
    expected = {(strategy, share, seed) for strategy in (NONE, TASK, ROLE) for share in FREQUENCIES for seed in seeds}
    assert {(row.strategy, row.frequency, row.seed) for row in rows} == expected
    assert all(row.outcome == "finished" and row.equal for row in rows)
    assert all(row.faults == round(50 * row.frequency) for row in rows)
    assert not any(row.again for row in rows if row.strategy == ROLE)  # no finished step is lost
    for share in FREQUENCIES[1:]:
        assert Study(rows).in_order(share)
