"""Readers of what other programs wrote, one file a source. They never guess, and import no torch."""

from moeproxy.traces.readers.rft_faultbench import RftRun, read_benchmark, read_run

__all__ = ["RftRun", "read_benchmark", "read_run"]
