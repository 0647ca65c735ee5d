"""What consoles show: metrics between progress bars, prefixes, colours and tracebacks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from moeproxy.traces.logs.barred import Barred
from moeproxy.traces.logs.literals import dicts
from moeproxy.traces.logs.nesting import MAX_KEY, flat
from moeproxy.traces.logs.printed import Printed
from moeproxy.traces.logs.sink import Sink
from moeproxy.traces.logs.strung import Strung

MAX_PENDING = 400  # lines of a dict printed over several lines, or of a traceback
MAX_HELD = 1 << 20  # characters of such a dict

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_RAY = re.compile(r"^\s*\(([\w.:<>-]+(?: [\w=:-]+)*? pid=\d+(?:, ip=[\w.:]+)?)\) ?")
_LABEL = re.compile(r"\([\w.:<>-]{1,80}(?: [\w=:-]{1,80}){0,3}? pid=\d+(?:, ip=[\w.:]+)?\)")
_RANK = re.compile(r"^\s*\[?((?:rank|default|worker)[ _]?\d+)\]?\s*:+ ?", re.IGNORECASE)
_VERSION = re.compile(
    r"\b(transformers|trl|verl|openrlhf|slime|ms[-_]swift|llamafactory|megatron[-_]core|nemo[-_]rl|vllm|sglang|torch)"
    r"(?:==|[ _]version['\"]?\s*[:=]?\s*)['\"]?v?(\d+\.\d[\w.+-]*)",
    re.IGNORECASE,
)
_HEADER = re.compile(r"((?:[A-Za-z][\w/]* ){0,3}?[A-Za-z][\w/]*)[ :=#]+(\d{1,15})\s*(?:/\s*\d+\s*)?[:\-|=>]*\s*$")
_PROGRESS = re.compile(r"(\d+)/(\d+)\s\[")
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Killed|Timeout|Warning)?\b.*$")
_FAILURES = (
    ("out of memory", re.compile(r"out of memory|OutOfMemory|\bOOM\b|oom-kill|OOMKilled")),
    ("killed", re.compile(r"^\s*Killed\s*$|\bSIGKILL\b|Signal 9\b|exitcode\s*:\s*-9")),
    ("signal", re.compile(r"\bSIG(?:TERM|SEGV|ABRT|BUS|INT)\b|[Ss]egmentation fault|core dumped")),
    ("error", re.compile(r"NCCL.{0,80}(?:timeout|timed out|error)|No space left on device")),
)
_STEPWORDS = ("step", "iteration", "rollout", "iter", "perf")
_CLOCKS = {"perf": "rollout/step"}
"""Keys under which the number in a heading counts, where it is not simply the step: slime's "perf 5: {...}"."""
_ANNOUNCES = re.compile(r"\b(?:Step|step) \d{1,15}:\s*$")
_BEGINS = re.compile(
    r"\{['\"]|.{0,300}?(?:\b(?:[Ss]tep|[Ii]teration|[Rr]ollout|perf) \d{1,15}\s*[:\-|=>]*\s*\{['\"]|\{['\"]step['\"]:)"
    r"|.*\bstep:\s*\d+ - "
)
"""How a line of metrics begins; within a dict over several lines none does."""
_FRESH = re.compile(r"[A-Za-z0-9]|\[\w")
"""How lines begin that are no part of a printed dict: those begin with space, a quote or a bracket."""


@dataclass
class _Pending:
    """A dict of metrics that goes on over the next lines of its process."""

    parts: list[str]
    start: int
    head: str
    held: int = 0


class Console:
    """Reads lines one after the other; keeps what may go on over the next lines."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._pending: dict[str, _Pending] = {}
        self._open: dict[str, list[int]] = {}
        self._traceback: dict[str, int] = {}
        self._announced: dict[str, str] = {}
        self._printed, self._strung, self._barred = Printed(sink), Strung(sink), Barred(sink)

    @property
    def waits(self) -> bool:
        """Whether the next line must be shown, whatever it holds."""
        own = self._pending or self._traceback or self._open or self._announced
        return bool(own or self._printed.waits or self._strung.waits or self._barred.waits)

    def line(self, text: str, number: int) -> None:
        """Take one line."""
        plain = _ANSI.sub("", text) if "\x1b" in text else text
        if plain.count(" pid=") > 1:  # a missing line end: what stands behind a second label is another process's
            places = [0, *(match.start() for match in _LABEL.finditer(plain, 1)), len(plain)]
            for start, end in pairwise(places):
                self._line(plain[start:end], number)
        else:
            self._line(plain, number)

    def _line(self, plain: str, number: int) -> None:
        origin, body = _prefix(plain)
        if origin in self._announced:
            body = self._follows(self._announced.pop(origin), body)
        if origin in self._pending and self._continued(self._pending[origin], body, origin):
            return
        self._note_failures(body, number, origin)
        for name, version in _VERSION.findall(body) if "==" in body or "version" in body else ():
            self._sink.versions.setdefault(name.lower().replace("_", "-"), version)
        if self._printed.line(body, number, origin) and "{" not in body:
            return
        if self._strung.line(body, number, origin):
            return
        if self._barred.line(body, number, origin):
            return
        if "{" not in body and _ANNOUNCES.search(body):
            self._announced[origin] = body.rstrip()
            return
        if ("{" in body or self._open) and not self._inside(body, origin):
            self._dicts(body, number, origin)

    def give_up(self, origin: str | None = None) -> None:
        """Drop what was to go on over further lines (of one process), since something else begins."""
        for name in [name for name in self._pending if origin in (None, name)]:
            self._sink.skip(self._pending.pop(name).start, "a dict that does not end")
        for name in [name for name in self._open if origin in (None, name)]:
            del self._open[name]

    @staticmethod
    def _follows(announced: str, body: str) -> str:
        """SkyRL: "Step 5:" and on the next line its dict."""
        return f"{announced} {body.lstrip()}" if body.lstrip().startswith("{") else body

    @staticmethod
    def _goes_on(body: str) -> bool:
        """Whether a line is no part of the configuration before it: the log goes on, so that was cut, or no dict."""
        if _BEGINS.match(body) or _ANNOUNCES.search(body):
            return True
        if not _FRESH.match(body) or "{" not in body:
            return False
        found, unfinished = dicts(body)
        return bool(found) and not unfinished

    def _inside(self, body: str, origin: str) -> bool:
        """Whether a line belongs to a configuration that began on an earlier one: its parts are no metrics."""
        state = self._open.get(origin)
        if state is None:
            return False
        if self._goes_on(body):
            del self._open[origin]
            return False
        state[0] += body.count("{") - body.count("}")
        state[1] += 1
        if state[1] > MAX_PENDING:
            del self._open[origin]
            return True
        if state[0] <= 0:
            del self._open[origin]
        return True

    def _dicts(self, body: str, number: int, origin: str) -> None:
        found, unfinished = dicts(body)
        place = 0
        for start, cells in found:
            self._dict(cells, body[place:start], number, origin)
            place = start
        if unfinished:
            tail = _start_of_rest(body, len(found))
            head = _HEADER.search(body[:tail][-120:])
            if head is not None and _step_word(head[1]):
                self._pending[origin] = _Pending([body[tail:]], number, body[:tail])
                return
            depth = body[tail:].count("{") - body[tail:].count("}")
            if depth > 0:
                self._open[origin] = [depth, 0]
                self._sink.skip(number, "a dict over several lines, not after a step: a configuration")
            else:
                self._sink.skip(number, "a dict that holds something else than plain values")

    def _dict(self, cells: dict[str, Any], before: str, number: int, origin: str) -> None:
        if "step" in cells and isinstance(cells.get("metrics"), dict):  # ROLL: "metrics_tag: {step, metrics: {}}"
            cells = {"step": cells["step"]} | cells["metrics"]
        head = _HEADER.search(before[-120:])
        stepped = any(key.endswith("step") and not isinstance(value, dict) for key, value in cells.items())
        announced = head is not None and _step_word(head[1])
        if any(isinstance(value, dict) for value in cells.values()):
            if not (stepped or announced):
                return  # a configuration, not a row of metrics
            cells = flat(cells)
        if not cells:
            return
        if head is not None and announced and not stepped:
            word = head[1].split()[-1].lower()
            cells = {_CLOCKS.get(word, "step"): int(head[2])} | cells
            self._sink.hints.add(f"{word} N: dict")
        self._sink.row({key[:MAX_KEY]: value for key, value in cells.items()}, number, origin)

    def _continued(self, pending: _Pending, body: str, origin: str) -> bool:
        """Take a further line of a dict printed over several lines; False when it is none."""
        if _BEGINS.match(body) or _ANNOUNCES.search(body):
            self.give_up(origin)
            return False
        pending.parts.append(body)
        pending.held += len(body)
        if pending.held <= MAX_HELD and body.rstrip().endswith("}"):
            found, unfinished = dicts("\n".join(pending.parts))
            if found and not unfinished:
                self._dict(found[0][1], pending.head, pending.start, origin)
                del self._pending[origin]
                return True
        if len(pending.parts) > MAX_PENDING or pending.held > MAX_HELD:
            self.give_up(origin)
        return True

    def _note_failures(self, body: str, number: int, origin: str) -> None:
        if "Traceback (most recent call last)" in body:
            self._traceback[origin] = number
        elif origin in self._traceback:
            self._exception(body, number, origin)
        for kind, pattern in _FAILURES:
            if pattern.search(body):
                self._sink.find(kind, number, body)
                break
        bars = _PROGRESS.findall(body) if "[" in body else []
        if bars:
            self._sink.find("progress", number, "{}/{}".format(*bars[-1]))

    def _exception(self, body: str, number: int, origin: str) -> None:
        """The first line after a traceback that is not indented names the exception."""
        start = self._traceback[origin]
        inside = not body.strip() or body[:1].isspace() or number - start > MAX_PENDING
        if number - start > MAX_PENDING:
            del self._traceback[origin]
        if not inside and _EXCEPTION.match(body):
            self._sink.find("traceback", number, body)
            # Ray repeats the remote traceback after naming itself; what went wrong stands at the end of that.
            if "RayTaskError" in body:
                self._traceback[origin] = number
            else:
                del self._traceback[origin]


_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.]*(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?")
"""What container runtimes put before every line."""
_LABELS = (
    re.compile(r"^\s{0,4}(\d{1,4}): "),  # srun -l
    re.compile(r"^\[(\d{1,4},\d{1,6})\]<std(?:out|err)>: ?"),  # mpirun --tag-output
    re.compile(r"^((?!(?:step|iter|epoch|rollout|rank)[\w.-]*:)(?=[\w.-]*[A-Za-z])[\w.-]{0,60}\d): (?=\S|\s)"),  # pdsh
)
"""How launchers label the lines of a task."""


def _prefix(text: str) -> tuple[str, str]:
    """Return which process wrote a line, and the rest of it."""
    text, names = _STAMP.sub("", text), []
    for patterns in (_LABELS, (_RAY, _RANK)):
        match = next(filter(None, (pattern.match(text) for pattern in patterns)), None)
        if match is not None:
            names.append(match[1])
            text = text[match.end() :]
    return " ".join(names), text


def _step_word(words: str) -> bool:
    return words.lower().split()[-1] in _STEPWORDS


def _start_of_rest(body: str, n_read: int) -> int:
    place = -1
    for match in re.finditer(r"""\{\s*(?=['"])""", body):
        place = match.start()
        if n_read == 0:
            break
        n_read -= 1
    return max(place, 0)
