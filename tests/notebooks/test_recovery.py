"""Notebook 07 runs from top to bottom, kills the trainer, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeproxy.recovery import read_events
from tests.notebooks.running import check_executed, execute
from tests.recovery.processes import gone, running

PROBE = """
panel.end()
panel.join(60)
panel.begin()
panel.wait_for(2)
assert panel.job.running
"""


@pytest.mark.job
@pytest.mark.kill
def test_every_cell_runs_and_a_kernel_that_ends_takes_the_job_with_it(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'moeproxy[recovery]'")
    check_executed(execute("07_recovery.ipynb", PROBE, tmp_path / "root", tmp_path / "home"), n_figures=0)
    jobs = sorted((tmp_path / "root" / "out" / "recovery").glob("job-*[0-9]"))
    assert len(jobs) == 2
    for job in jobs:
        started = {event.info["pid"] for event in read_events(job) if event.event == "start"}
        assert started
        assert not gone(lambda pids=started: {pid for pid in pids if running(pid)}, 30)
