"""At which step, and in which tensor, two runs part."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from moeproxy.errors import RecoveryError
from moeproxy.recovery.saved import save_json, saved_json

_FORMAT = "moeproxy.parting"
_SNAPSHOT = re.compile(r"after(\d+)\.pt$")
_SHOWN = 6


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in both runs.

    Args:
        name: part and tensor, as "weights/model.norm.weight".
        largest: largest absolute difference; None where only digests were kept, or shapes or dtypes differ.
        changed: number of elements that differ, or None.
        missing: "a" or "b" when that run does not have the tensor at all, else "".
    """

    name: str
    largest: float | None = None
    changed: int | None = None
    missing: str = ""

    def __str__(self) -> str:
        if self.missing:
            return f"{self.name} (only in the {'second' if self.missing == 'a' else 'first'} run)"
        return self.name if self.largest is None else f"{self.name} ({self.changed} values, up to {self.largest:.3g})"


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Args:
        runs: names of both.
        steps: how many steps both kept, and so were compared.
        step: the first step after which their states differ, or None.
        last_equal: the last compared step before it, None when there is none.
        differences: every tensor that differs after `step`, causes first (see `moeproxy.recovery.digests.PARTS`).
        tensors: number of tensors in the state at `step`.
        repeats: steps that were done more than once by either run, and compared each time.
        ends: the last step that each run kept whole; None in a file of an older version.
    """

    runs: tuple[str, str]
    steps: int
    step: int | None
    last_equal: int | None
    differences: tuple[Difference, ...] = ()
    tensors: int = 0
    repeats: tuple[int, ...] = ()
    ends: tuple[int, int] | None = None

    @property
    def equal(self) -> bool:
        """Whether all compared states are equal bit for bit, and neither run ends before the other."""
        return self.step is None and not self.shorter

    @property
    def shorter(self) -> str:
        """The run that ends before the other, "a" or "b", so that the rest cannot be compared; else ""."""
        if self.ends is None or self.ends[0] == self.ends[1]:
            return ""
        return "a" if self.ends[0] < self.ends[1] else "b"

    @property
    def tensor(self) -> str | None:
        """The first tensor that differs, or None."""
        return self.differences[0].name if self.differences else None

    def __repr__(self) -> str:
        again = f", {len(self.repeats)} of them done more than once" if self.repeats else ""
        if self.step is None:
            return f"Parting(equal bit for bit in all {self.steps} steps compared{again}{self._rest()})"
        shown = ", ".join(map(str, self.differences[:_SHOWN]))
        rest = f" and {len(self.differences) - _SHOWN} more" if len(self.differences) > _SHOWN else ""
        return f"Parting(after step {self.step}, {len(self.differences)} of {self.tensors} tensors: {shown}{rest})"

    def _rest(self) -> str:
        if not self.ends or not self.shorter:
            return ""
        end, names = min(self.ends), ("first", "second") if self.shorter == "a" else ("second", "first")
        return (
            f"; the {names[0]} run ends with step {end}, the {names[1]} goes on to step {max(self.ends)}: "
            f"nothing can be compared from step {end + 1} on"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(' and '.join(self.runs))}: {escape(repr(self)[8:-1])}</p>"

    def save(self, path: str | Path) -> Path:
        """Write the result to a JSON file, atomically, and return its path."""
        return save_json(path, _FORMAT, asdict(self))

    @staticmethod
    def load(path: str | Path) -> Parting:
        """Read what `save` wrote.

        Raises:
            RecoveryError: the file is something else.
        """
        with saved_json(path, _FORMAT, "comparison of two runs") as stored:
            first, second = stored.pop("runs")
            found = tuple(Difference(**item) for item in stored.pop("differences"))
            ends = tuple(stored.pop("ends", None) or ())
            return Parting(
                **{**stored, "repeats": tuple(stored["repeats"])},
                runs=(first, second),
                differences=found,
                ends=(ends[0], ends[1]) if ends else None,
            )


@runtime_checkable
class _Run(Protocol):
    """What two runs are compared by: digests of every step, and whole states where they were kept."""

    @property
    def steps(self) -> set[int]: ...

    def digests(self, step: int) -> list[dict[str, str]]: ...

    def tensors(self, step: int) -> dict[str, Any] | None: ...


class _Logged:
    """A run that kept digests only."""

    def __init__(self, path: Path) -> None:
        from moeproxy.recovery.digests import read_digests

        self._found = read_digests(path)

    @property
    def steps(self) -> set[int]:
        return set(self._found)

    def digests(self, step: int) -> list[dict[str, str]]:
        return self._found[step]

    def tensors(self, step: int) -> dict[str, Any] | None:
        return None  # they were not kept


class _Kept:
    """A run that kept whole states (`moeproxy.lab.snapshot`); one is in memory at a time."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = {int(match[1]): path for path in paths if (match := _SNAPSHOT.search(path.name))}

    @property
    def steps(self) -> set[int]:
        return set(self._paths)

    def digests(self, step: int) -> list[dict[str, str]]:
        from moeproxy.recovery.digests import digests

        return [digests(self._state(step))]

    def tensors(self, step: int) -> dict[str, Any]:
        from moeproxy.recovery.digests import PARTS, leaves

        state = self._state(step)
        return {name: value for part in PARTS if part in state for name, value in leaves(state[part], part)}

    def _state(self, step: int) -> dict[str, Any]:
        from moeproxy.lab.snapshot import Snapshot

        return vars(Snapshot.load(self._paths[step]))


def verify(run_a: str | Path, run_b: str | Path) -> Parting:
    """Compare two runs bit for bit and say at which step, and in which tensor, they part.

    A run that was cut off is not equal to one that was not: the steps that both have are compared, and the result says
    with which step the shorter one ends (`Parting.shorter`). A last step that not every rank came to log is none.

    Args:
        run_a, run_b: each a folder of snapshots (`Snapshots` of a lab run), a folder with the log `digests.jsonl` of a
            run in roles, or such a log. Snapshots show by how much tensors differ, too.

    Raises:
        RecoveryError: a run kept nothing to compare, or the two have no step in common.
        LabError: a snapshot cannot be read.

    Example:
        >>> verify("undisturbed", "killed-in-step-7").equal
        True
    """
    first, second = _opened(Path(run_a)), _opened(Path(run_b))
    common = sorted(first.steps & second.steps)
    if not common:
        raise RecoveryError(
            "the two runs have no step in common",
            where=f"{run_a} and {run_b}",
            expected=f"some of the steps {_range(first.steps)} in the other, which has {_range(second.steps)}",
        )
    names, last, repeats, compared = (str(run_a), str(run_b)), None, [], 0
    ends = {"a": max(first.steps), "b": max(second.steps)}
    for step in common:
        sides = first.digests(step), second.digests(step)
        parted = _parted(*sides)
        lacking = {item.missing for item in parted}
        if parted and last is not None and all(ends.get(side) == step for side in lacking):
            ends |= dict.fromkeys(lacking, last)  # it was cut off while its ranks logged this step, as before they had
            break
        repeats += [step] if max(map(len, sides)) > 1 else []
        compared += 1
        if parted:
            measured = _measured(parted, first.tensors(step), second.tensors(step))
            everything = len({name for side in sides for state in side for name in state})
            kept = (ends["a"], ends["b"])
            return Parting(names, len(common), step, last, measured, everything, tuple(repeats), kept)
        last = step
    return Parting(names, compared, None, last, repeats=tuple(repeats), ends=(ends["a"], ends["b"]))


def _opened(path: Path) -> _Run:
    from moeproxy.recovery.digests import FILE

    if path.is_file() and path.suffix == ".jsonl":
        return _Logged(path)
    if (path / FILE).is_file():
        return _Logged(path / FILE)
    snapshots = sorted(path.glob("*after*.pt"))
    if not snapshots:
        raise RecoveryError(
            "nothing to compare", where=path, expected=f"snapshots (*-after00007.pt), or a log of digests ({FILE})"
        )
    runs = {snapshot.name.partition("-after")[0] for snapshot in snapshots}
    if len(runs) > 1:
        raise RecoveryError(
            f"snapshots of {len(runs)} runs in one folder",
            where=path,
            expected="those of one model, seed and settings",
            remedy="give each run a folder of its own",
        )
    return _Kept(snapshots)


def _parted(first: list[dict[str, str]], second: list[dict[str, str]]) -> tuple[Difference, ...]:
    """Return what differs anywhere among the states that either run had after one step, in the order of the state."""
    order = dict.fromkeys(name for state in (*first, *second) for name in state)
    found = []
    for name in order:
        absent = [side for side, states in (("a", first), ("b", second)) if not any(name in s for s in states)]
        # Ranks may log their parts of a step apart: what a line does not name, it does not deny.
        if absent or len({state[name] for state in (*first, *second) if name in state}) > 1:
            found.append(Difference(name, missing=absent[0] if absent else ""))
    return tuple(found)


def _measured(
    parted: tuple[Difference, ...], first: dict[str, Any] | None, second: dict[str, Any] | None
) -> tuple[Difference, ...]:
    if first is None or second is None:
        return parted
    return tuple(item if item.missing else _size(item.name, first[item.name], second[item.name]) for item in parted)


def _size(name: str, left: Any, right: Any) -> Difference:
    """Return by how much two tensors differ; NaN counts as a difference without a size."""
    alike = (
        hasattr(left, "shape") and hasattr(right, "shape") and (left.shape, left.dtype) == (right.shape, right.dtype)
    )
    if not alike or not left.numel():
        return Difference(name)
    apart = (left.double() - right.double()).abs()
    unequal = (left != right) & ~((left != left) & (right != right))
    return Difference(name, float(apart.nan_to_num(0.0).max()), int(unequal.sum()))


def _range(steps: set[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "(none)"
