"""The report: complete, self-contained, accessible, and equal in its three forms."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest

from moeproxy.errors import MoeproxyError
from moeproxy.files import provenance
from moeproxy.triage.compare import compare_all
from moeproxy.triage.jsonable import plain
from moeproxy.view import render_html
from moeproxy.view.document import cell
from moeproxy.view.report import ReportInput, write_report
from tests.triage.synthetic import CALIBRATION, SCORED
from tests.view import shared


class Page(HTMLParser):
    """Collects tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", ""
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.text += " "  # cells of a table must not run together

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open not in ("script", "style"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def full() -> ReportInput:
    traces = shared.traces()
    recorded = [trace for trace in traces if trace.provenance.source == "recorded"]
    proxy = SimpleNamespace(plan=shared.plan(), check=SimpleNamespace(verdict="reloads equal"))
    return ReportInput(
        summary=("A model with <tiny> experts was pruned.",),
        checkpoint=cast(Any, shared.checkpoint()),
        profile=shared.profile(),
        plan=shared.plan(),
        proxy=cast(Any, proxy),
        costs=shared.costs(),
        accuracy=shared.accuracy(),
        accuracy_original=0.86,
        traces=tuple(traces),
        comparisons=compare_all(recorded, calibration_seeds=CALIBRATION, scored_seeds=SCORED),
        seconds=(("profile", 3.2),),
        limits=("Two faults only.",),
        provenance=provenance(seed=0),
    )


@pytest.fixture(scope="module")
def folder(full: ReportInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(full, tmp_path_factory.mktemp("out")).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "index.html").read_text("utf-8"))


def test_files_and_place(folder: Path) -> None:
    assert folder.name == "report"
    assert sorted(path.name for path in folder.iterdir()) == ["files.json", "index.html", "report.json", "report.md"]


def test_page_is_self_contained(folder: Path, page: Page) -> None:
    assert not [a for tag, a in page.tags if tag in ("link", "img", "iframe")]
    assert not [a for a in page.all("script") if "src" in a]
    assert all((a.get("href") or "").startswith("#") for a in page.all("a"))
    source = (folder / "index.html").read_text("utf-8")
    assert source.count("plotly.js v") == 1
    assert len(source) < 8e6


def test_every_figure_has_words_and_a_table(page: Page) -> None:
    n_figures = len(page.all("figure"))
    assert n_figures == 10
    assert len(page.all("figcaption")) == n_figures
    images = [a for a in page.all("div") if a.get("role") == "img"]
    assert len(images) == n_figures
    assert all(len(a["aria-label"] or "") > 30 for a in images)
    for number in range(1, n_figures + 1):
        assert f"Data of figure {number} as a table" in page.text


def test_page_is_accessible(page: Page) -> None:
    assert page.all("html") == [{"lang": "en"}]
    assert all(a.get("scope") in ("col", "row") for a in page.all("th"))
    assert len(page.all("h1")) == 1
    assert len(page.all("caption")) == len(page.all("table"))
    anchors = [a["href"] for a in page.all("a")]
    assert anchors == [f"#{a['id']}" for a in page.all("h2")]
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))


def test_text_is_escaped_and_sources_are_marked(folder: Path, page: Page) -> None:
    assert "A model with <tiny> experts was pruned." in page.text
    source = (folder / "index.html").read_text("utf-8")
    assert '<span class="tag live">live</span>' in source
    assert '<span class="tag">recorded</span>' in source
    assert "Live in this run: original (2 runs), cluster-16 (2 runs)." in page.text


def test_sections_say_the_verdict(page: Page, full: ReportInput) -> None:
    assert "quiet_update: reproduced by cluster-16" in page.text
    for comparison in full.comparisons:
        for sentence in comparison.statements:
            assert sentence in page.text
    for title in ("Limits", "Provenance", "Model and cost"):
        assert title in page.text
    assert "Two faults only." in page.text
    assert "reloads equal" in page.text
    assert "Not run" not in page.text


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+\.\d+", text))


def test_three_forms_say_the_same_numbers(folder: Path, page: Page, full: ReportInput) -> None:
    markdown = (folder / "report.md").read_text("utf-8")
    assert numbers(markdown) == numbers(page.text)
    data = json.loads((folder / "report.json").read_text("utf-8"))
    assert [section["title"] for section in data["sections"]] == re.findall(r"^## (.*)$", markdown, re.M)
    for row, result in zip(data["verdicts"], full.comparisons[0].proxies, strict=False):
        assert row["rank"] == result.rank.mean
        assert f"{row['rank']:.2f}" in markdown
    for row in data["accuracy"]:
        assert cell(row["accuracy"]) in markdown
    assert data["costs"][2]["seconds_per_step"] is None


def test_empty_report_says_not_run(tmp_path: Path) -> None:
    page = Page(write_report(ReportInput(), tmp_path).read_text("utf-8"))
    assert page.text.count("Not run: ") == 9
    assert not page.all("figure")
    assert "there is no verdict" in page.text


def test_invisible_fault_is_said_to_be_so(tmp_path: Path) -> None:
    from tests.triage.synthetic import runs

    quiet = compare_all(runs("original", 32, {"none": {}}) + runs("cluster-16", 16, {"none": {}}))
    page = Page(write_report(ReportInput(comparisons=quiet), tmp_path).read_text("utf-8"))
    assert "none: not visible on the original" in page.text
    alone = compare_all(runs("original", 32, {"none": {"kl": 9}}))
    page = Page(write_report(ReportInput(comparisons=alone), tmp_path).read_text("utf-8"))
    assert "Not run: no proxy was compared." in page.text


def test_older_report_is_replaced_and_bad_places_are_refused(
    full: ReportInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ReportInput(title="first")
    write_report(small, tmp_path)
    assert "second" in write_report(ReportInput(title="second"), tmp_path).read_text("utf-8")
    assert len(list((tmp_path / "report").iterdir())) == 4
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MoeproxyError, match=r"cannot be written.*another output directory"):
        write_report(small, blocked)

    def fail(*_: object) -> str:
        raise RuntimeError("drawing failed")

    monkeypatch.setattr("moeproxy.view.report.render_html", fail)
    before = (tmp_path / "report" / "report.md").read_text("utf-8")
    with pytest.raises(RuntimeError):
        write_report(ReportInput(title="third"), tmp_path)
    assert (tmp_path / "report" / "report.md").read_text("utf-8") == before


def test_report_is_the_same_bytes_twice(full: ReportInput, tmp_path: Path) -> None:
    one, two = (write_report(full, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == two


def test_cells() -> None:
    values = [None, np.nan, pd.NA, True, np.int64(12345), 0.123456, 123456.7, "x"]
    assert [cell(value) for value in values] == ["–", "–", "–", "yes", "12,345", "0.1235", "123,457", "x"]
    assert plain({"a": (np.float64("nan"), np.int64(2), Path("x"))}) == {"a": [None, 2, "x"]}
    assert "tag" not in render_html._value("alive")
