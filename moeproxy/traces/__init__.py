"""What a run leaves behind: the wire between running and judging. Imports no torch."""

from moeproxy.traces.partial import load_partial, partial_path
from moeproxy.traces.signals import SIGNALS, TRAJECTORY_COLUMNS, Signal, layer_of, signal_of
from moeproxy.traces.trace import RunInfo, Trace, load_dir

__all__ = [
    "SIGNALS",
    "TRAJECTORY_COLUMNS",
    "RunInfo",
    "Signal",
    "Trace",
    "layer_of",
    "load_dir",
    "load_partial",
    "partial_path",
    "signal_of",
]
