"""Run a command under a memory limit that the system enforces, and measure what it took."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/memory")
_V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Usage:
    """What a process took: seconds, peak of anonymous memory and of resident memory in bytes, exit code, output."""

    seconds: float
    anonymous: int
    resident: int
    code: int
    output: str


def run_limited(command: list[str], limit: int | None) -> tuple[Usage, str]:
    """Run a command under a limit in bytes (None: without); return what it took and how it was limited."""
    with _control_group(limit) as group:
        how = "no limit" if limit is None else "control group (memory and cached files)" if group else "RLIMIT_DATA"

        def enter() -> None:
            if group:
                (group / "cgroup.procs").write_text(str(os.getpid()))
            elif limit is not None:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        started = time.perf_counter()
        # What the child is to do before it runs is two system calls, and no thread of this process holds a lock then.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enter)
        anonymous, resident = _watch(process)
        output = process.stdout.read() if process.stdout else ""
        return Usage(time.perf_counter() - started, anonymous, resident, process.wait(), output), how


@contextmanager
def _control_group(limit: int | None) -> Iterator[Path | None]:
    """A new memory control group with the limit; None where there may be none."""
    root, name = (_V1, "memory.limit_in_bytes") if (_V1 / "cgroup.procs").exists() else (_V2, "memory.max")
    group = root / f"moeproxy-benchmark-{os.getpid()}"
    try:
        if limit is not None:
            group.mkdir()
            (group / name).write_text(str(limit))
        yield group if limit is not None else None
    except OSError:
        yield None
    finally:
        if group.is_dir():
            group.rmdir()


def _watch(process: subprocess.Popen[str]) -> tuple[int, int]:
    """Largest anonymous and resident memory seen, looking fifty times a second."""
    anonymous = resident = 0
    while process.poll() is None:
        facts = _status(process.pid)
        anonymous, resident = max(anonymous, facts.get("RssAnon", 0)), max(resident, facts.get("VmRSS", 0))
        time.sleep(0.02)
    return anonymous, resident


def _status(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "VmRSS"))}
