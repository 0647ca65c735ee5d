"""Sweeps as programs of their own: without a guard, killed, interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeproxy.traces import Trace, load_partial

pytestmark = pytest.mark.slow

# As a reader writes it: no `if __name__ == "__main__"`.
SCRIPT = """
import signal, sys
from pathlib import Path
from moeproxy.lab.settings import GRPOSettings, RunSpec
from moeproxy.lab.sweep import sweep

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
model, out, *steps = sys.argv[1:]
settings = [GRPOSettings(steps=int(n), prompts=4, samples=4, tasks=64) for n in steps]
specs = [RunSpec(Path(model), seed=seed, settings=item) for seed, item in enumerate(settings)]
sweep(specs, Path(out), workers=2, progress=lambda spec, step, steps: print(spec.seed, step, flush=True))
"""
ENDLESS = "1000000"


@contextmanager
def _script(model: Path, folder: Path, *steps: str) -> Iterator[subprocess.Popen[str]]:
    file = folder / "script.py"
    file.write_text(SCRIPT)
    command = [sys.executable, str(file), str(model), str(folder / "out"), *steps]
    # A session of its own: its process group holds every process that comes from the script.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            if _alive(process.pid):
                os.killpg(process.pid, signal.SIGKILL)


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until_gone(group: int, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while _alive(group) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _alive(group), "processes of the sweep are still there"


def _read_until(process: subprocess.Popen[str], wanted: set[str]) -> None:
    assert process.stdout is not None
    seen: set[str] = set()
    for line in process.stdout:
        seen.add(line.strip())
        if wanted <= seen:
            return
    raise AssertionError(f"the script ended early; it said {seen}")


def test_a_script_needs_no_guard(qwen3: Path, tmp_path: Path) -> None:
    with _script(qwen3, tmp_path, "1", "2") as process:
        assert process.stdout is not None
        said = process.stdout.read().split("\n")
        assert process.wait() == 0
    assert sorted(filter(None, said)) == ["0 1", "1 1", "1 2"]
    assert [len(Trace.load(file).steps) for file in sorted((tmp_path / "out").glob("*.parquet"))] == [1, 2]
    _wait_until_gone(process.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_loses_only_the_runs_in_flight(qwen3: Path, tmp_path: Path, number: int) -> None:
    with _script(qwen3, tmp_path, "1", ENDLESS, ENDLESS, ENDLESS) as process:
        _read_until(process, {"0 1", "1 1", "2 1"})
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal and a notebook do
        else:
            process.send_signal(number)
        assert process.wait(60) not in (0, None)
        _wait_until_gone(process.pid)
    (file,) = (tmp_path / "out").glob("*.parquet")
    assert Trace.load(file).provenance.seed == 0
    # Of the runs in flight the finished steps are kept.
    kept = [load_partial(file) for file in (tmp_path / "out").glob("*.partial")]
    assert sorted(trace.provenance.seed for trace in kept) == [1, 2]
    assert all(len(trace.steps) >= 1 for trace in kept)
