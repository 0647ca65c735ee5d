"""Coverage-guided fuzzing of the readers with atheris, outside the suite (pip install atheris; it is no dependency).

    python -m tests.traces.fuzz_guided CORPUS -max_total_time=300 -max_len=4096

CORPUS is a folder; the samples of every source are written into it first. An error other than TraceError stops the run,
and the input that caused it is kept in the working directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["moeproxy.traces"]):
    from moeproxy.errors import TraceError
    from moeproxy.traces.logs.dispatch import fill, kind_of
    from moeproxy.traces.logs.opening import sources
    from moeproxy.traces.logs.sink import Sink

from tests.traces.samples import SAMPLES

FILE = Path(tempfile.mkdtemp()) / "x.log"


def one(data: bytes) -> None:
    """Read one file up to its rows."""
    FILE.write_bytes(data)
    try:
        for source in sources(FILE):
            sink = Sink()
            fill(source, kind_of(source), sink)
            for run in sink.runs.values():
                run.store.finish()
    except TraceError:
        return


if __name__ == "__main__":
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    for name, sample in SAMPLES.items():
        (corpus / name.replace(" ", "-")).write_bytes(sample)
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()
