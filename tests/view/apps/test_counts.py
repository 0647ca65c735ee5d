"""The count asked for at first: any whole number, the nearest possible one is taken."""

from __future__ import annotations

import numpy as np
import pytest

from moeproxy.errors import ProxyError
from moeproxy.view.apps.counts import CountControl, whole_count
from moeproxy.view.apps.ui import Status


@pytest.mark.parametrize("value", ["x", "8", 8.0, True, [8]])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ProxyError, match=r"no whole number\. Expected: one of 4, 8, 16\. What to do"):
        whole_count(value, [4, 8, 16])


def test_numpy_counts_are_whole() -> None:
    assert type(whole_count(np.int64(8), [4, 8, 16])) is int


@pytest.mark.parametrize(("value", "first"), [(None, 8), (16, 16), (13, 16), (0, 4), (99, 16)])
def test_the_first_count_is_the_nearest_possible(value: int | None, first: int) -> None:
    control = CountControl([4, 8, 16], value, Status(), lambda: None)
    assert control.value == control.box.value == first
