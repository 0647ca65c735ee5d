"""What a run leaves behind: the wire between running and judging. Imports no torch."""

from moeproxy.traces.following import LogFollower
from moeproxy.traces.logtrace import LogInfo, LogTrace, overlay_notes
from moeproxy.traces.partial import load_partial, partial_path
from moeproxy.traces.reading import read
from moeproxy.traces.signals import LOG_SIGNALS, SIGNALS, TRAJECTORY_COLUMNS, Signal, layer_of, signal_of
from moeproxy.traces.suggesting import Suggestion, suggest
from moeproxy.traces.trace import RunInfo, Trace, load_dir

__all__ = [
    "LOG_SIGNALS",
    "SIGNALS",
    "TRAJECTORY_COLUMNS",
    "LogFollower",
    "LogInfo",
    "LogTrace",
    "RunInfo",
    "Signal",
    "Suggestion",
    "Trace",
    "layer_of",
    "load_dir",
    "load_partial",
    "overlay_notes",
    "partial_path",
    "read",
    "signal_of",
    "suggest",
]
