"""Metrics that programs print for people: NeMo-RL's bullets, AReaL's boxed tables, what stands after a progress bar."""

from __future__ import annotations

import re
from typing import Any

from moeproxy.traces.logs.cells import bare
from moeproxy.traces.logs.nesting import MAX_KEY
from moeproxy.traces.logs.sink import Sink

MAX_TABLE = 2000  # lines of one table
MAX_BARS = 1000

_RULE = re.compile(r"(?<!=)={5,} (Epoch|Step) (\d{1,9})/(\d{1,9}) ={5,}\s*$")
_SECTION = re.compile(r"\b(Training Results|Validation Results|Validation Timing|Timing):\s*$")
_BULLET = re.compile(
    r"\s*• ([^:•]{1,80}): ([-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))(?:s|%| steps| tokens)?(?: \(.*)?\s*$"
)
_PREFIX = {"Training Results": "", "Timing": "timing/"}
_DONE = re.compile(r"\bTrain step (\d{1,15})/\d+ done")
_BAR = re.compile(r"(?:^|\s)([^\r|]{0,80}?)\s*\d+%\|[^|]{0,200}\|\s*(\d{1,15})/(\d{1,15})\s\[([^\[\]]{0,4000})\]")
_POSTFIX = re.compile(r"(?:^|, )([A-Za-z_][\w/@. -]{0,80}?)=([^,=]{1,60}?)(?=, [A-Za-z_][\w/@. -]{0,80}?=|\s*$)")
_EPISODE = re.compile(r"Episode \[(\d{1,6})/\d+\]")

Row = dict[str, Any]


class Printed:
    """Recognises such output line by line; it remembers the step that a heading named, and a table that is open."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._epoch: dict[str, int] = {}
        self._step: dict[str, int] = {}
        self._section: dict[str, str] = {}
        self._trained: dict[str, int] = {}
        self._table: dict[str, tuple[int, int, Row]] = {}
        self._bars: dict[tuple[str, str], str] = {}

    @property
    def waits(self) -> bool:
        """Whether a table is open, whose lines say nothing of themselves."""
        return bool(self._table)

    def line(self, body: str, number: int, origin: str) -> bool:
        """Take a line; False when it is nothing of this kind."""
        if origin in self._table and (_DONE.search(body) or _RULE.search(body)):
            self._sink.skip(self._table.pop(origin)[0], "a table that does not end")
        if origin in self._table or "╒" in body:
            return self._boxed(body, number, origin)
        if "•" in body:
            return self._bullet(body, number, origin)
        if "= " in body and (match := _RULE.search(body)):
            self._rule(match, origin)
            return True
        if match := _SECTION.search(body):
            self._section[origin] = match[1]
            return True
        if match := _DONE.search(body):
            self._trained[origin] = int(match[1])
            return True
        return "=" in body and "%|" in body and self._bar(body, number, origin)

    def _rule(self, match: re.Match[str], origin: str) -> None:
        """NeMo-RL: "===== Epoch 2/3 =====", "===== Step 5/100 =====", the steps of each epoch counted from 1."""
        if match[1] == "Epoch":
            self._epoch[origin] = int(match[2])
            return
        epoch = self._epoch.get(origin, 1)
        self._step[origin] = (epoch - 1) * int(match[3]) + int(match[2])
        if epoch > 1:
            self._sink.note("the console counts steps within each epoch; those of earlier epochs were added")

    def _bullet(self, body: str, number: int, origin: str) -> bool:
        """NeMo-RL: "  • Generation KL Error: 0.0010", under a heading that says of what."""
        match = _BULLET.match(body)
        section = self._section.get(origin)
        if match is None or section is None:
            return False
        prefix = _PREFIX.get(section, "validation/")
        cells: Row = {prefix + match[1].strip(): bare(match[2])}
        step = self._step.get(origin)
        self._sink.hints.add("bullets")
        self._sink.row(({"step": step} if step is not None else {}) | cells, number, origin)
        return True

    def _boxed(self, body: str, number: int, origin: str) -> bool:
        """AReaL: keys and values in turn between bars, for the step that "Train step 5/100 done." named before."""
        start, seen, cells = self._table.pop(origin, (number, 0, {}))
        if "╒" in body:
            cells = {}
        elif "│" in body:
            parts = [part.strip() for part in body.split("│")[1:-1]]
            pairs = zip(parts[::2], parts[1::2], strict=False)
            cells |= {key[:MAX_KEY]: bare(value) for key, value in pairs if key and value}
        if "╘" in body or seen >= MAX_TABLE:
            if seen >= MAX_TABLE:
                self._sink.skip(start, "a table that does not end")
            self._boxed_row(cells, start, origin)
        else:
            self._table[origin] = (start, seen + 1, cells)
        return True

    def _boxed_row(self, cells: Row, number: int, origin: str) -> None:
        step = self._trained.get(origin)
        if not any(isinstance(value, int | float) for value in cells.values()):
            return
        self._sink.hints.add("boxed table")
        if step is not None:
            self._sink.note("the console counts train steps from 1; the run's trackers count them from 0")
        self._sink.row(({"step": step} if step is not None else {}) | cells, number, origin)

    def _bar(self, body: str, number: int, origin: str) -> bool:
        """tqdm's set_postfix: "Episode [1/2]:  3%|...| 4/100 [00:10<01:00, 2.5s/it, act_loss=0.123, kl=0.01]"."""
        took = False
        for match in _BAR.finditer(body):
            values = {key.strip(): bare(value.strip()) for key, value in _POSTFIX.findall(match[4])}
            cells: Row = {key: value for key, value in values.items() if not isinstance(value, str)}
            if not cells:
                continue
            took = True
            if self._drawn_before((origin, match[1].strip()), str(values)):
                self._sink.skip(number, "a progress bar drawn again with the same values")
                continue
            episode = _EPISODE.search(match[1])
            if episode is not None:
                cells = {"step": (int(episode[1]) - 1) * int(match[3]) + int(match[2])} | cells
            self._sink.hints.add("progress bar")
            self._sink.note("values from a progress bar have 3 significant digits")
            self._sink.row({"progress": int(match[2])} | cells, number, origin)
        return took

    def _drawn_before(self, bar: tuple[str, str], shown: str) -> bool:
        """tqdm draws a bar at each set_postfix and again as it moves on, then with the old values."""
        if self._bars.get(bar) == shown:
            return True
        if len(self._bars) >= MAX_BARS:
            self._bars.clear()
        self._bars[bar] = shown
        return False
