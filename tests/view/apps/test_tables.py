"""Tables beside figures: escaped, captioned, reachable by keyboard."""

from __future__ import annotations

import pandas as pd

from moeproxy.view.apps.tables import LiveTable, html_frame

FRAME = pd.DataFrame({"token": ["<b>", "&"], "lift": [2.5, 1.0]})


def test_cells_and_captions_are_escaped() -> None:
    text = html_frame(FRAME, "a < b")
    assert "a &lt; b</caption>" in text
    assert "&lt;b&gt;</td>" in text
    assert "&amp;</td>" in text
    assert text.count("scope='col'") == 2
    assert text.count("<tr>") == 3


def test_a_live_table_can_be_scrolled_and_opened_by_keyboard() -> None:
    table = LiveTable(100, folded=True)
    table.show(FRAME, 'what "it" is')
    assert "tabindex='0'" in table.widget.value
    assert "aria-label='what &quot;it&quot; is'" in table.widget.value
    assert table.widget.value.startswith("<details><summary")
    table.show(FRAME.iloc[:0], "nothing")
    assert table.widget.value == ""


def test_a_wide_table_scrolls_instead_of_breaking_its_cells() -> None:
    table = LiveTable(100, wrap=False)
    table.show(FRAME, "wide")
    assert table.widget.value.count("white-space:nowrap'>") == 6
    assert html_frame(FRAME, "narrow").count("white-space:nowrap'>") == 2, "heads alone"
    assert table.widget.layout.max_width == "950px"
