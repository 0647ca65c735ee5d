"""How long a step may take: computing measured or counted, communication recorded or by a formula, always a range.

No single number is given. A rank's own computing and the time on the wire are each bounded by assumptions that stand
beside the result, and how much of them overlaps is not known: the low end assumes that the shorter hides behind the
longer, the high end that nothing overlaps. Waiting for slower ranks is in recorded communication and in no formula.

Measured steps are few and noisy: a further step lies outside the smallest and largest of n with odds of 2 in n + 1. So
their range is where a further one lies with 95 %, if the logarithms of seconds are normally distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from moeproxy.errors import ScaleError
from moeproxy.proxy.hardware import Device, device
from moeproxy.scale import checks
from moeproxy.scale.emulation import Emulation, Traffic
from moeproxy.scale.recording import Recording

Range = tuple[float, float]
SHARE = 0.95
"""Share of further steps that a range of measured ones is to hold."""
FEWEST = 3
"""Measured steps with which there is a range."""
UTILISATION: Range = (0.1, 0.5)
"""Share of the peak rate that computing reaches: small grouped products at the low end, large dense ones above."""
LINKS: Range = (0.4, 0.9)
"""Share of a link's rate that collectives reach."""
LATENCY: Range = (5e-6, 50e-6)
"""Seconds a collective takes whatever its size, for each doubling of the group."""


NOT_COUNTED = "; memory-bound work (optimizer, logits) is in neither end"
"""Where operations are counted, time that memory's rate decides is missing: `Device.memory_tb_s` is not used."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of one rank, as ranges (low, high).

    Args:
        compute, communication: each alone.
        basis: what they rest on, in words.
        machine: for which machine they hold.
        measured: seconds of the real steps, smallest and largest as they were, where there were any.
    """

    compute: Range
    communication: Range
    basis: str
    machine: str
    measured: Range | None = None

    @property
    def total(self) -> Range:
        """From everything hidden that can be hidden to nothing overlapping."""
        return max(self.compute[0], self.communication[0]), self.compute[1] + self.communication[1]

    def __repr__(self) -> str:
        real = f", measured {span(self.measured)} s" if self.measured else ""
        return f"StepTime({span(self.total)} s on {self.machine}{real}; {self.basis})"


def recorded_time(recording: Recording, alone: Emulation) -> StepTime:
    """Put together a recorded rank's step: what it computes alone and what its collectives took in the real run.

    Both are for the machine of the recording, whose ranks wait for each other (and for processor cores, where there
    are fewer of them than ranks). The first step, which makes the optimizer's state, does not count, nor the last,
    which is metered in the replay.

    Args:
        recording: of the real run.
        alone: `emulate(level="replay")` of one of its ranks.

    Raises:
        ScaleError: `alone` is no replay of this recording, or there are fewer than five steps.
    """
    checks.kind(Recording, "pass what `record` or `Recording.open` returned", recording=recording)
    checks.kind(Emulation, 'pass what `emulate(level="replay")` returned', alone=alone)
    recording.check_replay(alone)
    if len(alone.seconds) < FEWEST + 1:
        raise ScaleError(
            f"a recording of {recording.steps} steps",
            expected=f"{FEWEST + 2} or more, since the first and the last are left out",
            remedy="record more steps",
        )
    spent = recording.communication(alone.rank)[1:]
    computed, communicated = likely(alone.seconds[1:]), likely(spent)
    basis = (
        f"{SHARE:.0%} ranges of {len(alone.seconds) - 1} steps computed alone and of {len(spent)} steps' communication "
        "as recorded, waiting included"
    )
    real = recording.seconds[alone.rank][1:]
    return StepTime(computed, communicated, basis, recording.provenance["machine"], (min(real), max(real)))


def likely(seconds: Sequence[float]) -> Range:
    """Return where a further step lies with `SHARE`, by Student's distribution of the logarithms.

    Args:
        seconds: measured steps, `FEWEST` or more.

    Raises:
        ScaleError: there are fewer, or one took no time.
    """
    if len(seconds) < FEWEST or not all(0 < one < np.inf for one in seconds):
        raise ScaleError(
            f"measured seconds {', '.join(f'{one:.3g}' for one in seconds) or 'of no step'}",
            expected=f"{FEWEST} steps or more, each finite and above 0",
            remedy="measure more steps",
        )
    logs = np.log(seconds)
    reach = stats.t.ppf((1 + SHARE) / 2, len(logs) - 1) * logs.std(ddof=1) * np.sqrt(1 + 1 / len(logs))
    return float(np.exp(logs.mean() - reach)), float(np.exp(logs.mean() + reach))


def device_time(
    emulation: Emulation,
    on: Device | str,
    *,
    compute: Sequence[float] | None = None,
    utilisation: Range = UTILISATION,
    links: Range = LINKS,
    latency: Range = LATENCY,
) -> StepTime:
    """Bound a step on a device type: operations counted over its peak rate, collectives by latency and bandwidth.

    Work that the memory's rate bounds (the optimizer, softmax over logits, norms) is in neither end: it has few
    operations, and `Device.memory_tb_s` is not used. A real step may take longer than the high end.

    Args:
        emulation: of any level.
        on: device type, or its name in `DEVICES`.
        compute: measured seconds of the rank's computing on such a device, `FEWEST` steps or more, instead of counted
            operations.
        utilisation, links: shares of the peak rates that are reached, low and high.
        latency: seconds of a collective for each doubling of its group, low and high.

    Raises:
        ScaleError: a range is no range, or too few steps were measured.

    Example:
        >>> device_time(emulate(program.sliced(4), 1024, 64), DEVICES["H100"])
        StepTime(0.0415 to 0.512 s on H100; ...)
    """
    checks.kind(Emulation, "pass what `emulate` returned", emulation=emulation)
    on = device(on) if isinstance(on, str) else on
    checks.kind(Device, "pass a Device or the name of one", on=on)
    for name, given in {"utilisation": utilisation, "links": links, "latency": latency}.items():
        if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
            raise ScaleError(f"{name} is {given!r:.60}", expected="a range (low, high)", remedy="pass two numbers")
        low, high = given
        for end, value in (("low", low), ("high", high)):
            checks.real(0, **{f"{name}'s {end} end": value}, above=False)
        if not 0 < low <= high or (name != "latency" and high > 1):
            raise ScaleError(f"{name} is {low} to {high}", expected="a range of positive numbers, shares at most 1")
    operations = sum(emulation.flops.values())
    counted = tuple(operations / (on.bf16_tflops * 1e12 * share) for share in reversed(utilisation))
    rests = f"{operations / 1e12:.3g} TFLOP at {utilisation[0]:.0%} to {utilisation[1]:.0%} of the peak"
    spent = tuple(
        sum(_seconds(one, on, emulation.world, share, wait) for one in emulation.traffic)
        for share, wait in zip(reversed(links), latency, strict=True)
    )
    return StepTime(
        likely(compute) if compute is not None else (counted[0], counted[1]),
        (spent[0], spent[1]),
        f"{f'{SHARE:.0%} range of {len(compute)} measured steps' if compute is not None else rests}, "
        f"links at {links[0]:.0%} to {links[1]:.0%}{'' if compute is not None else NOT_COUNTED}",
        on.name,
    )


def _seconds(traffic: Traffic, on: Device, world: int, share: float, wait: float) -> float:
    """Return the seconds of equal collectives: latency, and the bytes that leave one rank, over the slowest link."""
    if traffic.group < 2:
        return 0.0
    parts = {"all_reduce": 2.0, "broadcast": traffic.group / (traffic.group - 1)}
    moved = traffic.nbytes * (traffic.group - 1) / traffic.group * parts.get(traffic.op, 1.0)
    # Expert-parallel groups are neighbours and can share a node; FSDP's ranks stride over all of them.
    reach = traffic.group if traffic.op == "all_to_all" else world
    link = on.link_gb_s if reach <= on.per_node else on.network_gb_s
    doublings = (traffic.group - 1).bit_length()
    return traffic.count * (wait * doublings + moved / (link * 1e9 * share))


def span(given: Range, digits: int = 3) -> str:
    """Return a range in words, without a unit."""
    return f"{given[0]:.{digits}g} to {given[1]:.{digits}g}"
