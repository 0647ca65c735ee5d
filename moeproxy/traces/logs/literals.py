"""Dicts that programs print: Python or JSON, with NumPy's and torch's wrappings. Nothing is evaluated."""

from __future__ import annotations

import re
from typing import Any

from moeproxy.traces.logs.cells import bare

MAX_DEPTH = 16
MAX_ITEMS = 20_000

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<open>[{\[(])
    | (?P<close>[}\])])
    | (?P<comma>,)
    | (?P<colon>:)
    | (?P<string>[bru]?'(?:[^'\\\n]|\\.)*'|[bru]?"(?:[^"\\\n]|\\.)*")
    | (?P<call>[A-Za-z_][\w.]*)\s*\((?P<argument>[^(){}\[\]'"]{0,400})\)
    | (?P<word>[^\s,:{}\[\]()'"]+)
    )""",
    re.VERBOSE,
)
_START = re.compile(r"""\{\s*(?=['"])""")
_WORDS = {"None": None, "null": None, "True": True, "true": True, "False": False, "false": False}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_WRAPPERS = frozenset({"np", "numpy", "tensor", "torch", "array", "float", "int", "jnp"})


class NotALiteral(ValueError):
    """The text at this place is no dict of plain values."""


def dicts(text: str) -> tuple[list[tuple[int, dict[str, Any]]], bool]:
    """Return every dict with quoted keys that stands in a line, with its place, and whether one was left unfinished.

    Example:
        >>> dicts("1/9 {'loss': '0.5'} {'loss': np.float64(0.25)}")[0]
        [(4, {'loss': '0.5'}), (20, {'loss': 0.25})]
    """
    found, place, unfinished = [], 0, False
    while match := _START.search(text, place):
        try:
            value, place = _value(text, match.start(), 0)
            found.append((match.start(), value))
        except NotALiteral:
            unfinished = True
            # After a dict that cannot be read, its own contents must not be taken for others.
            return found, unfinished
    return found, unfinished


def _token(text: str, place: int) -> re.Match[str]:
    match = _TOKEN.match(text, place)
    if match is None:
        raise NotALiteral
    return match


def _value(text: str, place: int, depth: int) -> tuple[Any, int]:
    match = _token(text, place)
    kind = match.lastgroup
    if kind == "open":
        if depth >= MAX_DEPTH:
            raise NotALiteral
        reader = _mapping if match["open"] == "{" else _sequence
        return reader(text, match.end(), depth + 1)
    if kind == "string":
        return _string(match["string"]), match.end()
    if kind == "argument":
        return _call(match), match.end()
    if kind == "word":
        word = match["word"]
        return _WORDS[word] if word in _WORDS else bare(word), match.end()
    raise NotALiteral


def _mapping(text: str, place: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        match = _token(text, place)
        if match.lastgroup == "close":
            return found, match.end()
        key, place = _value(text, place, depth)
        match = _token(text, place)
        if match.lastgroup != "colon" or isinstance(key, dict | list):
            raise NotALiteral
        found[str(key)], place = _value(text, match.end(), depth)
        place = _after(text, place)
        if len(found) > MAX_ITEMS:
            raise NotALiteral


def _sequence(text: str, place: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        match = _token(text, place)
        if match.lastgroup == "close":
            return found, match.end()
        item, place = _value(text, place, depth)
        found.append(item)
        place = _after(text, place)
        if len(found) > MAX_ITEMS:
            raise NotALiteral


def _after(text: str, place: int) -> int:
    """Return the place after a comma, or before the closing bracket."""
    match = _token(text, place)
    if match.lastgroup == "comma":
        return match.end()
    if match.lastgroup == "close":
        return place
    raise NotALiteral


def _string(quoted: str) -> str:
    body = quoted.lstrip("bru")[1:-1]
    return _ESCAPED.sub(_unescaped, body) if "\\" in body else body


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _ESCAPES.get(match[2], match[2])


def _call(match: re.Match[str]) -> Any:
    """np.float64(0.25), tensor(0.5, device=...), float(nan) are their number; other calls stay text."""
    name, argument = match["call"], match["argument"].split(",")[0].strip()
    if name.split(".")[0] in _WRAPPERS:
        number = bare(argument)
        if not isinstance(number, str):
            return number
        if argument in _WORDS:
            return _WORDS[argument]
    return match[0].strip()
