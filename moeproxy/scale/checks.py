"""One check of what public functions are given: found, expected, what to do, instead of Python's own errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from moeproxy.errors import ScaleError


def whole(least: int | None = None, /, **numbers: Any) -> None:
    """Raise ScaleError unless all are whole numbers of at least `least`, by name."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Integral):
            raise ScaleError(
                f"{name} is {number!r}, {_kind(number)}",
                expected="a whole number" + ("" if least is None else f", at least {least}"),
                remedy=f"pass an int for {name}",
            )
        if least is not None and int(number) < least:
            raise ScaleError(f"{name} is {number}", expected=f"at least {least}", remedy=f"choose a larger {name}")


def real(least: float, *, above: bool = False, **numbers: Any) -> None:
    """Raise ScaleError unless all are finite numbers of at least `least` (or, with `above`, larger), by name."""
    words = f"a finite number {'above' if above else 'of at least'} {least:g}"
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ScaleError(f"{name} is {number!r}, {_kind(number)}", expected=words, remedy="pass a number")
        if not math.isfinite(number) or number < least or (above and number <= least):
            raise ScaleError(f"{name} is {number}", expected=words, remedy=f"choose another {name}")


def kind(wanted: type, remedy: str, **values: Any) -> None:
    """Raise ScaleError unless all are of the type `wanted`, by name.

    Args:
        wanted: the type.
        remedy: how to make one.
        values: by name.
    """
    for name, value in values.items():
        if not isinstance(value, wanted):
            raise ScaleError(f"{name} is {value!r:.80}, {_kind(value)}", expected=f"a {wanted.__name__}", remedy=remedy)


def config(given: Any) -> None:
    """Raise ScaleError unless it is a parsed config."""
    if not isinstance(given, Mapping):
        raise ScaleError(
            f"config is {given!r:.80}, {_kind(given)}",
            expected="the parsed config.json, a mapping",
            remedy="pass json.loads(Path('.../config.json').read_text())",
        )


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
