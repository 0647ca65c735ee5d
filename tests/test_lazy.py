"""Names of a package that are imported on first use."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from moeproxy.lazy import lazy_names


def test_a_name_is_imported_when_it_is_asked_for_and_then_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("some_package")
    monkeypatch.setitem(sys.modules, "some_package", package)
    find, names = lazy_names("some_package", {"colorsys": ("rgb_to_hsv", "hsv_to_rgb"), "no_such_module": ("gone",)})
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert {"rgb_to_hsv", "hsv_to_rgb", "gone", "__name__"} <= set(names())
    assert "colorsys" not in sys.modules
    assert find("rgb_to_hsv") is sys.modules["colorsys"].rgb_to_hsv
    assert vars(package)["rgb_to_hsv"] is find("rgb_to_hsv")
    with pytest.raises(AttributeError, match="module 'some_package' has no attribute 'nonsense'"):
        find("nonsense")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        find("gone")
