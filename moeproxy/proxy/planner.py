"""Device planner: the fewest devices on which an RL job of original or proxy fits, and what binds.

The sum is deliberately plain: every term is one line of arithmetic over sizes that the config fixes. `moeproxy.scale`
emulates the training part op by op; `tests/proxy/test_planner.py` holds this sum against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.proxy.hardware import DEVICES, Device, device
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape
from moeproxy.proxy.terms import STATE, rollout_terms, training_terms

if TYPE_CHECKING:
    import pandas as pd

MOST = 16384
"""Devices beyond which the search gives up."""


class TooLarge(ProxyError):
    """A job does not fit on any number of devices."""


@dataclass(frozen=True)
class Plan:
    """The fewest devices for one model size, and why not fewer.

    Args:
        n_experts: experts a layer.
        params: weights.
        devices: fewest that fit.
        trainer, rollout: devices of each role (the same ones where they are colocated).
        terms: bytes a device by moment (those of `training_terms`, and "rollout") and term.
        room: bytes a device may use.
        binding: moment and largest term that keep the next smaller number from fitting; or what of the layout does,
            where the first number that it allows already fits.
    """

    n_experts: int
    params: int
    devices: int
    trainer: int
    rollout: int
    terms: Mapping[str, Mapping[str, float]]
    room: float
    binding: str

    @property
    def fullest(self) -> float:
        """Bytes on the fullest device."""
        return max(sum(part.values()) for part in self.terms.values())


def plan_devices(
    model: Checkpoint | Mapping[str, Any] | ModelShape,
    layout: RLLayout,
    on: Device | str,
    n_experts: int | None = None,
) -> Plan:
    """Return the fewest devices on which the RL job fits.

    Args:
        model: a checkpoint, a parsed config, or their shape.
        layout: of the job.
        on: device type.
        n_experts: experts a layer; the original's by default.

    Raises:
        TooLarge: not even `MOST` devices are enough.
        ProxyError: no proxy can have so many experts, `ep` does not divide the original's, the skew is more than `ep`,
            or sequences are longer than the model's positions.

    Example:
        >>> plan_devices(QWEN3_30B_A3B, RLLayout(rollout_devices=8), "Ascend-910B").devices
        16
    """
    shape = model if isinstance(model, ModelShape) else ModelShape.of(model)
    if not isinstance(layout, RLLayout):
        raise ProxyError(f"layout is {layout!r:.80}", expected="an RLLayout", remedy="pass RLLayout(...)")
    kind = device(on) if isinstance(on, str) else on
    if not isinstance(kind, Device):
        raise ProxyError(
            f"on is {on!r:.80}", expected="a Device or the name of one", remedy=f"pass one of {', '.join(DEVICES)}"
        )
    count = shape.n_experts if n_experts is None else n_experts
    if count not in shape.counts:
        raise ProxyError(
            f"no proxy of this model can have {count} experts a layer",
            expected=f"{shape.counts[0]} to {shape.counts[-1]}, {len(shape.counts)} possible counts",
            remedy="choose one that `allowed_counts` lists",
        )
    _check_layout(shape, layout)
    before: Plan | None = None
    for number in layout.candidates(kind, MOST):
        plan = _tried(shape, layout, kind, count, number)
        if plan.fullest <= plan.room:
            return _with_reason(plan, before, layout, kind)
        before = plan
    raise _too_large(before, layout, kind)


def _check_layout(shape: ModelShape, layout: RLLayout) -> None:
    """Raise ProxyError unless the original's experts and positions suit the layout.

    More expert-parallel ranks than experts count as one for each, and a proxy's experts as spread evenly.
    """
    if shape.n_experts % min(layout.ep, shape.n_experts):
        possible = [n for n in range(1, shape.n_experts + 1) if shape.n_experts % n == 0]
        raise ProxyError(
            f"{shape.n_experts} experts cannot be spread evenly over {layout.ep} ranks",
            expected=f"ep = {', '.join(map(str, possible))}",
            remedy="choose another ep",
        )
    if layout.skew > layout.ep:
        raise ProxyError(
            f"skew is {layout.skew:g} with ep {layout.ep}",
            expected=f"at most {layout.ep}: then one rank of each group gets every row",
            remedy="lower the skew, or raise ep",
        )
    longest = layout.prompt + layout.response
    if shape.positions is not None and longest > shape.positions:
        raise ProxyError(
            f"sequences of {longest:,} tokens in a model with {shape.positions:,} positions",
            remedy="shorten prompt or response",
        )


def _tried(shape: ModelShape, layout: RLLayout, kind: Device, count: int, number: int) -> Plan:
    """Return what each device of `number` would hold, whether it fits or not."""
    trainer, rollout = layout.split(number)
    terms = training_terms(shape, layout, count, trainer)
    generating = rollout_terms(shape, layout, count, rollout)
    if layout.colocated and not layout.rollout_sleeps:  # both roles live on every device
        for moment in terms.values():
            moment |= {name: generating[name] for name in ("rollout weights", "key-value cache")}
    if layout.colocated and not layout.offload_weights:
        generating |= {f"trainer's {name}": terms["forward"][name] for name in STATE}
    terms["rollout"] = generating
    room = kind.memory_gib * 2**30 * layout.usable
    return Plan(count, shape.params(count), number, trainer, rollout, terms, room, "")


def _with_reason(plan: Plan, before: Plan | None, layout: RLLayout, kind: Device) -> Plan:
    reason = layout.smallest_because(kind) if before is None else binding(before)
    return Plan(**{**vars(plan), "binding": reason})


def binding(plan: Plan) -> str:
    """Return the phase that overflows and its largest term, with their sizes."""
    phase = max(plan.terms, key=lambda name: sum(plan.terms[name].values()))
    term = max(plan.terms[phase], key=lambda name: plan.terms[phase][name])
    need, largest = sum(plan.terms[phase].values()) / 2**30, plan.terms[phase][term] / 2**30
    return f"{phase}: {term} ({largest:.1f} of {need:.1f} GiB on {plan.devices})"


def _too_large(plan: Plan | None, layout: RLLayout, kind: Device) -> TooLarge:
    if plan is None:
        return TooLarge(
            f"no number of devices up to {MOST} suits the layout",
            expected=f"multiples of tp {layout.tp} and of {layout.rollout_devices} devices a rollout instance among "
            f"those that steps={layout.steps!r} tries",
            remedy="choose steps='any', or sizes that are powers of two",
        )
    return TooLarge(
        f"the job does not fit on {plan.devices} x {kind.name}: {binding(plan)}; "
        f"{plan.room / 2**30:.1f} GiB are usable",
        expected="a number of devices among which the state can be spread",
        remedy="shorten sequences, recompute activations, raise tp, ep or rollout_devices, offload, or choose another "
        "device",
    )


def plan_table(
    model: Checkpoint | Mapping[str, Any] | ModelShape,
    layout: RLLayout,
    on: Device | str,
    counts: Sequence[int] | None = None,
) -> pd.DataFrame:
    """Return one row for the original and one for every proxy size: experts, weights, devices, what binds.

    A size that fits on no number of devices has None for devices, and why as what binds.

    Args:
        model, layout, on: as in `plan_devices`.
        counts: proxy sizes; all possible ones by default.
    """
    import pandas as pd

    shape = model if isinstance(model, ModelShape) else ModelShape.of(model)
    wanted = sorted({*(shape.counts if counts is None else counts), shape.n_experts}, reverse=True)
    return pd.DataFrame([_row(shape, layout, on, count) for count in wanted])


def _row(shape: ModelShape, layout: RLLayout, on: Device | str, count: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": "original" if count == shape.n_experts else f"proxy-{count}",
        "experts": count,
        "params": shape.params(count),
    }
    try:
        plan = plan_devices(shape, layout, on, count)
    except TooLarge as error:
        return row | {"devices": None, "GiB a device": None, "binding": error.found}
    return row | {
        "devices": plan.devices,
        "GiB a device": round(plan.fullest / 2**30, 1),
        "binding": plan.binding,
    }


def device_hours(devices: int, seconds: float) -> float:
    """Return device-hours of one step (the paper's NPU-hours): devices times seconds over 3,600."""
    return devices * seconds / 3600
