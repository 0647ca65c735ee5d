"""What one rank of a full cluster sees, in one process: memory, collectives, and which rank runs out of memory."""

from moeproxy.scale.chakra import write_chakra
from moeproxy.scale.emulate import emulate, record, run_real
from moeproxy.scale.emulation import Emulation
from moeproxy.scale.estimate import estimate
from moeproxy.scale.finding import find_hottest, rank_peaks
from moeproxy.scale.hottest import fullest_by_sum
from moeproxy.scale.layout import Layout
from moeproxy.scale.program import GRPOProgram
from moeproxy.scale.recording import Recording
from moeproxy.scale.routing import Routing
from moeproxy.scale.timing import device_time, recorded_time

__all__ = [
    "Emulation",
    "GRPOProgram",
    "Layout",
    "Recording",
    "Routing",
    "device_time",
    "emulate",
    "estimate",
    "find_hottest",
    "fullest_by_sum",
    "rank_peaks",
    "record",
    "recorded_time",
    "run_real",
    "write_chakra",
]
