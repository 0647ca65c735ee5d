"""Files that mean harm, read in a process whose memory and time the system limits: refused, or read in bounds."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

MEMORY = 1800 << 20
"""Bytes of address space beyond what the process has after its imports."""

READER = """
import json, resource, sys, time
from moeproxy.errors import TraceError
from moeproxy.traces import read
mapped = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]),) * 2)
for name in sys.argv[2:]:
    started = time.process_time()
    try:
        logs = read(name)
        said = f"{sum(log.info.rows for log in logs)} rows; " + "; ".join(log.contents for log in logs)
    except TraceError as error:
        said = f"refused: {error}"
    print(json.dumps([name, said, time.process_time() - started]), flush=True)
"""
LINE = b'{"step": 1, "loss": 0.5}\n'


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def _tar_of_links(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for name, kind, target in [("a", tarfile.SYMTYPE, "/etc/passwd"), ("b", tarfile.LNKTYPE, "../../etc/passwd")]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
        info = tarfile.TarInfo("run.jsonl")
        info.size = len(LINE)
        archive.addfile(info, io.BytesIO(LINE))


def _archives(folder: Path) -> dict[str, str]:
    """Write archives and return what must be said of each."""
    zeros = b"\0" * 70_000_000
    (folder / "zeros.gz").write_bytes(gzip.compress(LINE + zeros))
    _zip(folder / "zeros.zip", {"run.jsonl": zeros})
    (folder / "lines.gz").write_bytes(gzip.compress(LINE + (b"x" * 9999 + b"\n") * 7_000))
    _zip(folder / "out.zip", {"../../run.jsonl": LINE})
    _tar_of_links(folder / "links.tar")
    deep = LINE
    for _ in range(6):
        deep = gzip.compress(deep)
    (folder / "deep.gz").write_bytes(deep)
    _zip(folder / "many.zip", {f"{n}.jsonl": b"" for n in range(10_001)})
    return {
        "zeros.gz": "decompression bomb",
        "zeros.zip": "decompression bomb",
        "lines.gz": "decompression bomb",
        "out.zip": "points out of the archive",
        "links.tar": "1 rows",
        "deep.gz": "archives within archives",
        "many.zip": "more than 10,000 files",
    }


def _texts(folder: Path) -> dict[str, str]:
    (folder / "digits.jsonl").write_bytes(LINE + b'{"step": 2, "loss": ' + b"9" * 30_000_000 + b"}\n" + LINE)
    (folder / "digits.json").write_bytes(b'{"log_history": [{"loss": ' + b"9" * 30_000_000 + b"}]}")
    (folder / "line.log").write_bytes(b"step:1 - a:1 " + b"x" * 30_000_000)
    (folder / "nested.json").write_bytes(b'{\n"log_history": ' + b"[" * 20_000_000)
    (folder / "nested.jsonl").write_bytes(b'{"a": ' * 1_000_000 + b"\n" + LINE)
    names = [f'"k{n}"' for n in range(16)]
    shapes = (
        "".join(f"{name}: 1, " for bit, name in enumerate(names) if number >> bit & 1) for number in range(30_000)
    )
    (folder / "shapes.jsonl").write_text("".join(f'{{{shape}"step": 1}}\n' for shape in shapes))
    return {
        "digits.jsonl": "longer than 8 MiB",
        "digits.json": "more than 4300 digits",
        "line.log": "longer than 8 MiB",
        "nested.json": "nested too deeply",
        "nested.jsonl": "nested too deeply",
        "shapes.jsonl": "30000 rows",
    }


@pytest.mark.timeout(300)
def test_hostile_files_end_in_bounded_memory_and_time(tmp_path: Path) -> None:
    expected = _archives(tmp_path) | _texts(tmp_path)
    files = [str(tmp_path / name) for name in expected]
    command = [sys.executable, "-c", READER, str(MEMORY), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = {Path(name).name: (text, taken) for name, text, taken in map(json.loads, done.stdout.splitlines())}
    assert set(said) == set(expected)
    for name, words in expected.items():
        text, taken = said[name]
        assert words in text, (name, text[:300])
        assert taken < 20, (name, taken)
