"""What the scale panel says beside its figure: ranks in numbers, what would fit, the planner's table."""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as widgets
import pandas as pd

from moeproxy.proxy.hardware import DEVICES, Device
from moeproxy.proxy.paper import devices_table
from moeproxy.proxy.planner import plan_table
from moeproxy.proxy.rl_layout import RLLayout
from moeproxy.proxy.shape import ModelShape
from moeproxy.scale.emulation import gib
from moeproxy.scale.estimate import estimate, ways_to_fit
from moeproxy.scale.timing import device_time, span
from moeproxy.view.apps.scale_settings import Case, Settings
from moeproxy.view.apps.tables import LiveTable
from moeproxy.view.figures_scale import GIB, Course, ScaleView

_ROWS = 10
PLANS = {
    "colocated, rollout instances of 8 devices": RLLayout(rollout_devices=8),
    "colocated, weights and optimizer offloaded": RLLayout(
        rollout_devices=8, offload_optimizer=True, offload_weights=True
    ),
    "half train, half generate in instances of 32": RLLayout(colocated=False, rollout_devices=32),
}


def emulated_table(courses: Sequence[Course], cases: Sequence[Case], layers: int | None, on: Device) -> pd.DataFrame:
    """Return the emulated ranks in numbers: peak, its place, the sum for the same layers, traffic, a range of seconds.

    Args:
        courses: of the emulations.
        cases: the same ranks, in the same order.
        layers: how many layers were emulated; None for all.
        on: device type for the seconds.
    """
    return pd.DataFrame([_row(*pair, layers, on) for pair in zip(courses, cases, strict=True)])


def _row(course: Course, case: Case, layers: int | None, on: Device) -> dict[str, object]:
    found = course.emulation
    summed = _summed(case, layers)
    return {
        "rank": _unbroken(course.label),
        "rows / mean": f"{case.rows(layers):.2f}",
        "peak": _unbroken(gib(found.peak_bytes)),
        "the sum says": f"{gib(round(summed))} ({summed / found.peak_bytes - 1:+.1%})",
        "arises in": f"{found.peak_phase}, {found.peak_module or 'outside any module'}",
        "moved": _unbroken(gib(found.communicated)),
        f"seconds on {on.name}": span(device_time(found, on).total, 2),
    }


def _unbroken(text: str) -> str:
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _summed(case: Case, layers: int | None = None) -> float:
    """Return the rank's peak for so many layers by the planner's sum, in bytes."""
    return estimate(case.sliced(layers), case.layout.world, case.layout.ep, case.load(layers)).peak_bytes


def advice_html(view: ScaleView, cases: Sequence[Case]) -> str:
    """Return what would make the fullest rank fit, as a list that screen readers announce; "" where all fit."""
    if not view.too_large:
        return ""
    worst = max(cases, key=_summed)
    room = view.room_gib * view.usable * GIB
    ways = ways_to_fit(worst.program, worst.layout, worst.load(), room)
    larger = sorted(one.memory_gib for one in DEVICES.values() if one.memory_gib > view.room_gib)
    need = max(bar.nbytes for bar in view.bars) / GIB / view.usable
    ways += [f"a device of {size:g} GiB" for size in larger if size >= need][:1]
    items = "".join(f"<li>{html.escape(way)}</li>" for way in ways[:_ROWS])
    none = ": no single change of these settings is enough, and no device type of the table is large enough"
    body = f"<ul style='margin:2px 0 2px 18px;padding:0'>{items}</ul>" if ways else none
    head = f"{worst.label} does not fit{'. Each of these alone would do (by the sum)' if ways else ''}"
    return f"<div role='status' aria-live='polite' style='line-height:1.4'>{html.escape(head)}{body}</div>"


def planned(settings: Settings, shape: ModelShape, plan: str, on: Device) -> pd.DataFrame:
    """Return the planner's table for the original and some proxy sizes, the chosen one among them.

    Args:
        settings: of the panel; expert parallelism, batch, lengths and recomputation go into the layout.
        shape: of the original.
        plan: one of `PLANS`.
        on: device type.
    """
    program = settings.program("original")
    layout = RLLayout(
        **{
            **vars(PLANS[plan]),
            "ep": settings.ep,
            "sequences": settings.sequences,
            "prompt": program.prompt,
            "response": program.completion,
            "checkpointing": settings.checkpointing,
        }
    )
    smaller = [count for count in shape.counts if count < shape.n_experts]
    some = {smaller[len(smaller) * part // _ROWS] for part in range(_ROWS)} if smaller else set()
    table = plan_table(shape, layout, on, sorted({*some, settings.n_keep} & set(shape.counts)))
    table["params"] = [f"{count / 1e9:.1f} B" for count in table["params"]]
    table["devices"] = ["none" if pd.isna(count) else f"{int(count):,}" for count in table["devices"]]
    table["GiB a device"] = ["" if pd.isna(size) else f"{size:g}" for size in table["GiB a device"]]
    return table.rename(columns={"binding": "what keeps it from fewer"})


def devices_view() -> widgets.Widget:
    """Return the device types with their figures and sources, whole, as a table to look at."""
    table = LiveTable(420)
    table.show(devices_table(), "Device types; UNVERIFIED marks what is not the vendor's own figure")
    return table.widget
