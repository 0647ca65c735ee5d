"""From rows to steps: clocks, rows of one step on several lines, resumes, restarts, interleaved processes."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from moeproxy.traces.logs.cells import Status
from moeproxy.traces.logs.rows import Column, Rows

MAX_STEP = 2**53
_EPOCH = 0.01  # to which a Trainer rounds epochs
TWICE = 0.1  # share of its steps that a process must log beside another one
MAX_PROCESSES = 1000  # that are told apart; a log with more names its rows, not who wrote them
_RESUMES = 3  # a log that goes back more often without repeating a step was not resumed each time
_NEWEST_FIRST = 0.9  # share of steps back beyond which the rows stand in reverse
_MOVED = 2  # places by which a row that two writers swapped stands behind the highest step before it
_AHEAD = 1000  # rows that are looked at for where a log that went back goes on
COMMON_STEPS = ("step", "Step", "_step", "global_step", "trainer/global_step", "iteration")
_OF = re.compile(r"\s*(\d{1,15})\s*/\s*\d{1,15}\s*\Z", re.ASCII)
_STEP_STATES = (Status.MEASURED, Status.NUMBER_TEXT)


@dataclass(frozen=True)
class Resume:
    """A place where a log goes back: the run was started again from an earlier step.

    Args:
        step: first step after the resume.
        before: last step before it.
        line: line of the first row after it.
    """

    step: int
    before: int
    line: int

    def __str__(self) -> str:
        return f"resumed at step {self.step} after step {self.before} (line {self.line})"


@dataclass
class Joined:
    """Which row belongs to which step, and which of them are shown.

    Args:
        steps: int64 (n,); -1 where a row has no step.
        clocks: for every row the key that its step comes from, by number; -1 without a step.
        clock_names: the keys.
        attempts: number of the resume that a row follows, from 0.
        shown: whether a row counts for the trace; rows after which the run was resumed earlier do not.
        resumes: in order.
        duplicates: steps that have the same signal twice with different values, other than by a resume.
        late: rows whose step had passed, and that bring other signals or fill a gap.
        notes: what a reader must know.
    """

    steps: np.ndarray
    clocks: np.ndarray
    clock_names: tuple[str, ...]
    attempts: np.ndarray
    shown: np.ndarray
    resumes: list[Resume] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    late: int = 0
    notes: list[str] = field(default_factory=list)


def steps_of(rows: Rows, keys: Sequence[str]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return step, clock and the clocks' names; the first key that a row has gives its step.

    A step is a whole number from 0 on, in quotes or not, or "5/3766".
    """
    names = tuple(dict.fromkeys([name for name in (*keys, *COMMON_STEPS) if name in rows.columns]))
    steps, clocks = np.full(len(rows), -1, np.int64), np.full(len(rows), -1, np.int32)
    for number, name in enumerate(names):
        found = _whole(rows.columns[name], len(rows))
        fresh = (steps < 0) & (found >= 0)
        steps[fresh], clocks[fresh] = found[fresh], number
    return steps, clocks, names


def newest_first(steps: np.ndarray, clocks: np.ndarray) -> bool:
    """Whether the rows stand in reverse, as exports and tables sorted by time often do."""
    there = steps >= 0
    if not there.any():
        return False
    moves = np.diff(steps[there & (clocks == clocks[there][0])])
    back = int((moves < 0).sum())
    return back > _RESUMES and back > _NEWEST_FIRST * int((moves != 0).sum())


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the different values in order, like `np.unique`, which is slow where they are sorted already."""
    ordered = values if np.all(values[1:] >= values[:-1]) else np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def _whole(column: Column, n_rows: int) -> np.ndarray:
    found = np.full(n_rows, -1, np.int64)
    good = np.isin(column.status, _STEP_STATES)
    with np.errstate(invalid="ignore"):
        good &= (column.values >= 0) & (column.values < MAX_STEP) & (column.values % 1 == 0)
    found[column.at[good]] = column.values[good].astype(np.int64)
    for row, text in column.texts.items():
        match = _OF.match(text)
        if match is not None:
            found[row] = int(match[1])
    return found


def numbered(rows: Rows, main: str) -> tuple[np.ndarray, int]:
    """Return steps for a log without any: the rows that have the key `main` are numbered from 1, the others have -1.

    Processes that write side by side are numbered each for itself. Where the epoch goes back the run was resumed;
    numbering goes on at the first row that has the epoch that is reached again.

    Returns:
        steps, and by how many rows at most they may be wrong after a resume (of rows that share an epoch).
    """
    steps, doubt = np.full(len(rows), -1, np.int64), 0
    at = rows.columns[main].at
    epochs = rows.columns["epoch"].dense(len(rows))[0][at] if "epoch" in rows.columns else np.full(len(at), np.nan)
    if np.isfinite(epochs).mean() > 0.5:  # rows of a Trainer have an epoch; another dict with a loss is none of them
        at, epochs = at[np.isfinite(epochs)], epochs[np.isfinite(epochs)]
    for mine in _side_by_side(rows.origins[at]):
        steps[at[mine]], unsure = _counted(epochs[mine])
        doubt = max(doubt, unsure)
    return steps, doubt


def _side_by_side(origins: np.ndarray) -> list[np.ndarray]:
    """Return the places of each process, or one group of all when they come one after the other."""
    found = distinct(origins)
    everything = [np.arange(len(origins))]
    if not 1 < len(found) <= MAX_PROCESSES:
        return everything
    groups = [np.flatnonzero(origins == origin) for origin in found]
    ends = sorted((int(places[0]), int(places[-1])) for places in groups)
    overlap = any(later[0] < earlier[1] for earlier, later in pairwise(ends))
    return groups if overlap else everything


def _counted(epochs: np.ndarray) -> tuple[np.ndarray, int]:
    numbers = np.zeros(len(epochs), np.int64)
    count, last, doubt = 0, -np.inf, 0
    seen: list[float] = []
    fine = _tell_rows_apart(epochs)
    for place, epoch in enumerate(epochs):
        if epoch < last or (fine and epoch == last):
            count = int(np.searchsorted(seen, epoch - 1e-9))
            doubt = max(doubt, int(np.searchsorted(seen, epoch + 1e-9)) - count - 1)
            del seen[count:]
        count += 1
        seen.append(epoch)
        last = epoch
        numbers[place] = count
    return numbers, doubt


def _tell_rows_apart(epochs: np.ndarray) -> bool:
    """Whether epochs are printed finely enough that two rows with the same one are the same row, logged again."""
    steps = np.diff(epochs)
    forward = steps[steps > 0]
    if not forward.size or (steps == 0).sum() > max(2, len(epochs) / 10):  # whole epochs, which many rows share
        return False
    decimals = next((n for n in range(7) if np.allclose(epochs * 10**n, np.round(epochs * 10**n), atol=1e-6)), 7)
    return bool(np.median(forward) >= 2 * min(10.0**-decimals, _EPOCH))


def join(
    rows: Rows, steps: np.ndarray, clocks: np.ndarray, names: tuple[str, ...], signals: Sequence[Column]
) -> Joined:
    """Say for every row which attempt it belongs to and whether it is shown.

    Args:
        rows: all rows.
        steps: of `steps_of` or `numbered`.
        clocks: of `steps_of`.
        names: of the clocks.
        signals: columns that are canonical signals; only these make two rows of one step a duplicate.
    """
    attempts = np.zeros(len(rows), np.int32)
    joined = Joined(steps, clocks, names, attempts, steps >= 0)
    masks = _masks(signals, len(rows))
    for clock in distinct(clocks[steps >= 0]):
        at = np.flatnonzero((clocks == clock) & (steps >= 0))
        if np.all(np.diff(steps[at]) > 0):
            continue
        _walk(rows, joined, at, masks, signals)
    return joined


class _Order:
    """Tells a row that stands behind its place from the first row after a resume.

    Rows that several writers or a newest-first export put out of order fill gaps that the log left, on the same grid of
    steps, and no step after them comes a second time. A resumed run repeats steps, or takes others than before. Where
    a log goes back often and never repeats a step, its rows are mixed.

    Args:
        steps: of the rows of one clock, int64 (n,).
        masks: which signals each has, uint64 (n,).
    """

    def __init__(self, steps: np.ndarray, masks: np.ndarray) -> None:
        self._steps = steps
        widths, counts = np.unique(np.abs(np.diff(steps)), return_counts=True)
        counts[widths == 0] = 0
        self._grid = int(widths[counts.argmax()]) if counts.any() else 0
        self._rank = np.searchsorted(distinct(steps), steps)
        self._again = self._next_repetition(steps, masks)
        self._mixed = int((np.diff(steps) < 0).sum()) > _RESUMES and bool((self._again == len(steps)).all())

    @staticmethod
    def _next_repetition(steps: np.ndarray, masks: np.ndarray) -> np.ndarray:
        """Return for every row the place of the next row whose step has had one of its signals before; n for none."""
        seen: dict[int, int] = {}
        repeats = np.zeros(len(steps), bool)
        for place, (step, mask) in enumerate(zip(steps.tolist(), masks.tolist(), strict=True)):
            before = seen.get(step, 0)
            repeats[place] = bool(before & mask)
            seen[step] = before | mask
        places = np.where(repeats, np.arange(len(steps)), len(steps))
        return np.minimum.accumulate(places[::-1])[::-1]

    def late(self, place: int, highest: int, seen: Container[int]) -> bool:
        """Whether the row at `place`, whose step is none of `seen` and below the highest of them, is only late."""
        if self._mixed:
            return True
        step, again = int(self._steps[place]), int(self._again[place])
        moved = int(self._rank[:place].max()) - int(self._rank[place]) if place <= _AHEAD else _MOVED + 1
        if moved > _MOVED and (step - self._grid not in seen and step + self._grid not in seen):
            return False
        ahead = self._steps[place : min(again, place + _AHEAD)]
        return again == len(self._steps) or again > place + _AHEAD or bool((ahead > highest).any())


def _masks(signals: Sequence[Column], n_rows: int) -> np.ndarray:
    """Return for every row which signals it has, as bits of an integer."""
    masks = np.zeros(n_rows, np.uint64)
    for place, column in enumerate(signals[:64]):
        there = (column.status != Status.EMPTY) & (column.status != Status.NULL)
        masks[column.at[there]] |= np.uint64(1 << place)
    return masks


def _walk(rows: Rows, joined: Joined, at: np.ndarray, masks: np.ndarray, signals: Sequence[Column]) -> None:
    """Go through the rows of one clock that do not simply increase."""
    seen: dict[int, int] = {}
    rows_of: dict[int, list[int]] = {}
    highest, attempt, starts = -1, 0, [0]
    order = _Order(joined.steps[at], masks[at])
    for place, row in enumerate(at.tolist()):
        step, mask = int(joined.steps[row]), int(masks[row])
        if step > highest:
            highest = step
        elif step < highest and mask and (mask & seen[step] if step in seen else not order.late(place, highest, seen)):
            attempt += 1
            joined.resumes.append(Resume(step, highest, int(rows.lines[row])))
            starts.append(step)
            seen, rows_of, highest = {}, {}, step
        elif mask & seen.get(step, 0):
            if not _equal(row, rows_of[step], signals):
                joined.duplicates.append(step)
        elif step < highest:
            joined.late += 1
        seen[step] = seen.get(step, 0) | mask
        rows_of.setdefault(step, []).append(row)
        joined.attempts[row] = attempt
    for number, start in enumerate(starts[1:], 1):
        old = at[joined.attempts[at] < number]
        joined.shown[old[joined.steps[old] >= start]] = False


def _equal(row: int, others: list[int], signals: Sequence[Column]) -> bool:
    """Whether a row says the same as the earlier rows of its step wherever both say something."""
    for column in signals:
        mine = _cell(column, row)
        if mine is None:
            continue
        for other in others:
            theirs = _cell(column, other)
            if theirs is not None and theirs != mine:
                return False
    return True


def _cell(column: Column, row: int) -> tuple[int, float | None] | None:
    place = int(np.searchsorted(column.at, row))
    if place == len(column.at) or column.at[place] != row:
        return None
    value = float(column.values[place])
    return int(column.status[place]), None if np.isnan(value) else value


def restarts(rows: Rows, steps: np.ndarray, clocks: np.ndarray, signals: Sequence[Column]) -> np.ndarray:
    """Return for every row the number of the run in this log.

    A return to the very first step or to one before it begins another run, if it has a signal that the first step has
    already; otherwise it is a late row, as one is that stands behind its place. Rows without a step belong to the run
    of the row before them.
    """
    parts = np.zeros(len(rows), np.int32)
    there = np.flatnonzero(steps >= 0)
    if there.size < 2:
        return parts
    clock = clocks[there[0]]
    at = there[clocks[there] == clock]
    walked = steps[at]
    back = np.flatnonzero((np.diff(walked) < 0) & (walked[1:] <= walked[0])) + 1
    if not back.size:
        return parts
    masks = _masks(signals, len(rows))[at]
    order, run = _Order(walked, masks), _Begun(walked, masks, 0)
    for place in back.tolist():
        run.take(place)
        step = int(walked[place])
        late = step not in run.seen and order.late(place, run.highest, run.seen)
        if not late and masks[place] & run.first:
            parts[at[place] :] += 1
            run = _Begun(walked, masks, place)
    return parts


class _Begun:
    """What one run of a log has had up to some row: its steps, their highest, and the signals of its first step."""

    def __init__(self, steps: np.ndarray, masks: np.ndarray, start: int) -> None:
        self._steps, self._masks, self._start, self._taken = steps, masks, start, start
        self.seen: set[int] = set()
        self.highest, self.first = -1, np.uint64(0)

    def take(self, end: int) -> None:
        """Take the rows before `end` that have not been taken."""
        new = self._steps[self._taken : end]
        self.seen.update(new.tolist())
        self.highest = max(self.highest, int(new.max()))
        same = self._masks[self._taken : end][new == self._steps[self._start]]
        self.first |= np.bitwise_or.reduce(same)
        self._taken = end


def interleaved(rows: Rows, steps: np.ndarray, signals: Sequence[Column]) -> list[int]:
    """Return the processes that logged the same signals of the same steps side by side; [] when there is one story."""
    if not 1 < len(rows.origin_names) <= MAX_PROCESSES:
        return []
    masks = _masks(signals, len(rows))
    has = (masks > 0) & (steps >= 0)
    found = [number for number in range(len(rows.origin_names)) if has[rows.origins == number].any()]
    spans = {n: np.flatnonzero(has & (rows.origins == n))[[0, -1]] for n in found}
    for left in found:
        for right in found:
            if left < right and spans[left][0] < spans[right][1] and spans[right][0] < spans[left][1]:
                mine, theirs = (_by_step(steps, masks, has & (rows.origins == n)) for n in (left, right))
                common, ours, others = np.intersect1d(mine[0], theirs[0], return_indices=True)
                twice = int((mine[1][ours] & theirs[1][others] != 0).sum())
                # A line that lost its label by a tear is no second process: it says what nobody else says.
                if common.size and twice > TWICE * min(len(mine[0]), len(theirs[0])):
                    return found
    return []


def _by_step(steps: np.ndarray, masks: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps of the chosen rows, each once, and which signals they have there."""
    order = np.flatnonzero(chosen)[np.argsort(steps[chosen], kind="stable")]
    found, starts = np.unique(steps[order], return_index=True)
    return found, np.bitwise_or.reduceat(masks[order], starts)
