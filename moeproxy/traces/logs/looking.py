"""Which lines of a console are worth a look: most of a long log is chatter, and must cost next to nothing."""

from __future__ import annotations

import re

_BAR = b" ["
_TABLE = {
    b"{": rb"\{\s*['\"]",
    b"step:": rb"\bstep:\s*\d",
    b"iteration": rb"iteration\s+\d+\s*/",
    b"Traceback": rb"Traceback",
    b"rror": rb"[Ee]rror",
    b"OOM": rb"OOM",
    b"out of memory": rb"out of memory",
    b"Killed": rb"Killed",
    b"SIG": rb"SIG[A-Z]{3,}",
    b"NCCL": rb"NCCL",
    b"egmentation": rb"[Ss]egmentation",
    b"Step ": rb"\bStep \d+(?: \||:\s*$)|= Step \d",
    b"==": rb"==\d",
    b"version": rb"version",
    b"core dumped": rb"core dumped",
    b"No space left": rb"No space left",
    b"= Epoch": rb"= Epoch \d",
    b"Train step": rb"Train step \d",
    b"\xe2\x80\xa2": rb"\xe2\x80\xa2",
    b"\xe2\x95\x92": rb"\xe2\x95\x92",
    b"Results:": rb"Results:\s*$",
    b"Timing:": rb"Timing:\s*$",
    _BAR: rb"\d+/\d+\s\[",
}
"""A word, and the pattern around it that makes a line worth a look."""

INTERESTING = re.compile(b"|".join(_TABLE.values()), re.MULTILINE)
"""Text without any of these holds nothing that the console's reader takes."""

_WORDS = tuple((word, re.compile(pattern)) for word, pattern in _TABLE.items())
_BARS = re.compile(rb"(\d+)/(\d+)\s\[")
NOTHING, BAR, LOOK = 0, 1, 2


class Looker:
    """Tells lines apart. Of a stretch of text it first finds which words occur at all: few do, and only these count."""

    def __init__(self) -> None:
        self._words = _WORDS
        self._text: bytes | None = None

    def ahead(self, text: bytes) -> None:
        """Take the text that the next lines are parts of. It is looked through when one of them is asked about."""
        self._text = text

    def kind(self, line: bytes) -> int:
        """Return `NOTHING`, `LOOK`, or `BAR` for a progress bar with nothing else to it."""
        if self._text is not None:
            text, self._text = self._text, None
            self._words = tuple(entry for entry in _WORDS if entry[0] in text)
        for word, pattern in self._words:
            if word in line and pattern.search(line) is not None:
                if word is not _BAR:
                    return LOOK
                # Values after a bar and colours within it need the closer look.
                return LOOK if b"=" in line or b"\x1b" in line else BAR
        return NOTHING


def progress(line: bytes) -> str:
    """Return the last state of the progress bars of a line.

    Example:
        >>> progress(b" 50%|##  | 1/2 [00:01<00:01]")
        '1/2'
    """
    done, total = _BARS.findall(line)[-1]
    return f"{done.decode()}/{total.decode()}"
