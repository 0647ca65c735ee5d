"""Distinct values are those of numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.traces.logs.joining import distinct


@given(st.lists(st.integers(-5, 5)), st.booleans())
def test_distinct(values: list[int], ordered: bool) -> None:
    array = np.array(sorted(values) if ordered else values, np.int64)
    before = array.copy()
    assert distinct(array).tolist() == np.unique(array).tolist()
    assert array.tolist() == before.tolist()
