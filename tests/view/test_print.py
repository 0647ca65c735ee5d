"""Figures for print: width, type, vectors, fonts within; and reports on machines without kaleido or a browser."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from PIL import Image

from moeproxy.errors import MoeproxyError
from moeproxy.view import report, svg_fonts
from moeproxy.view.document import Document, Figure, Section
from moeproxy.view.figures_timeline import timeline_figure
from moeproxy.view.gather import gather
from moeproxy.view.image_browser import ImageBrowser, NoImages, with_resolution
from moeproxy.view.print_layout import DOUBLE, LEAST_PT, SINGLE, sheet, smallest_px
from moeproxy.view.report import compose, write_document
from moeproxy.view.report_images import FOLDER, Images, _font_words
from moeproxy.view.style import finish
from moeproxy.view.timeline import timeline
from tests.view import postmortems, shared

_BOX = re.compile(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]")
_MM = 25.4 / 72
HOSTILE = "<script>alert(1)</script>"

_NAMES = ("chromium", "chromium-browser", "google-chrome")
needs_browser = pytest.mark.skipif(
    not (os.environ.get("CI") or os.environ.get("CHROMIUM") or any(map(shutil.which, _NAMES))),
    reason="no chromium found: apt-get install chromium, or set CHROMIUM to its path",
)


@pytest.fixture(scope="module")
def figure() -> go.Figure:
    return timeline_figure(timeline(postmortems.resumed(), postmortems.ACTIONS), HOSTILE)


@pytest.fixture(scope="module")
def images(figure: go.Figure) -> tuple[bytes, bytes, bytes]:
    made = sheet(figure, SINGLE, svg_fonts.family())
    assert made is not None
    with ImageBrowser() as browser:
        return browser.draw(made)


def test_a_sheet_is_as_wide_as_its_column_and_can_be_read(figure: go.Figure) -> None:
    for column in (SINGLE, DOUBLE):
        made = sheet(figure, column, "DejaVu Sans")
        assert made is not None
        assert made.width_px / made.factor * 25.4 / 96 == pytest.approx(column.mm)
        assert made.smallest_pt >= LEAST_PT
        assert made.height_mm < 247, "the height of a page"
        assert made.figure.layout.title.text == ""
        assert made.figure.layout.font.family == "DejaVu Sans"
    assert 85 <= SINGLE.mm <= 89
    assert 174 <= DOUBLE.mm <= 183
    assert figure.layout.title.text, "the figure itself is as it was"


def test_one_whose_type_would_be_too_small_is_for_a_double_column_only() -> None:
    wide = finish(go.Figure(), title="t", alt="a", table=shared.costs(), height=300, width=900)
    assert sheet(wide, SINGLE, "x") is None
    assert sheet(wide, DOUBLE, "x") is not None
    wide.add_annotation(text="tiny", font={"size": 6})
    assert smallest_px(wide) == 6
    assert sheet(wide, DOUBLE, "x") is None
    with pytest.raises(MoeproxyError, match="no text alternative"):
        sheet(go.Figure(), SINGLE, "x")


def test_pixels_become_vectors_but_for_very_long_lines() -> None:
    short, long = ({"x": list(range(n)), "y": list(range(n)), "mode": "lines"} for n in (10, 6000))
    both = go.Figure([go.Scattergl(short), go.Scattergl(long)])
    made = sheet(finish(both, title="", alt="a", table=shared.costs(), height=300), SINGLE, "x")
    assert made is not None
    assert [trace.type for trace in made.figure.data] == ["scatter", "scattergl"]
    assert list(made.figure.data[0].x) == list(range(10))


@needs_browser
def test_svg_is_in_millimetres_and_holds_its_font(images: tuple[bytes, bytes, bytes]) -> None:
    root = ET.fromstring(images[0])
    assert root.attrib["width"] == "88mm"
    assert root.attrib["height"].endswith("mm")
    words = "".join(root.itertext())
    assert "attempt 1 of 2" in words
    assert not [item for item in root.iter() if item.tag.endswith(("script", "image", "foreignObject"))]
    links = [value for item in root.iter() for name, value in item.attrib.items() if name.endswith("href")]
    assert not [link for link in links if not link.startswith("#")]
    if svg_fonts.face() is not None:
        assert f'@font-face{{font-family:"{svg_fonts.family()}"' in words
        assert "url(data:font/woff;base64," in words
        assert "http" not in words


@needs_browser
def test_pdf_has_the_width_of_the_column_and_its_fonts(images: tuple[bytes, bytes, bytes]) -> None:
    pdf = images[1]
    (box,) = _BOX.findall(pdf)
    assert 85 <= float(box[0]) * _MM <= 89
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") == 1 or b"/Count 1" in pdf
    fonts = pdf.count(b"/Type /FontDescriptor")
    assert fonts >= 1
    assert len(re.findall(rb"/FontFile[23]? ", pdf)) == fonts, "every font is in the file"
    assert re.search(rb"/BaseFont /[A-Z]{6}\+", pdf), "as a subset"
    assert b"/Subtype /Image" not in pdf, "vectors only"


@needs_browser
def test_png_is_sharp_and_painted(images: tuple[bytes, bytes, bytes]) -> None:
    picture = Image.open(io.BytesIO(images[2]))
    assert abs(picture.width - 88 / 25.4 * 600) <= 2
    assert picture.info["dpi"] == pytest.approx((600, 600), abs=0.1)
    greys = picture.convert("L").getcolors(256)
    assert greys is not None
    assert len(greys) > 50


@pytest.mark.parametrize("dpi", [96, 600])
def test_a_png_says_how_large_it_is_on_paper(dpi: int) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (7, 5), (1, 2, 3)).save(stream, "png")
    plain = stream.getvalue()
    sized = with_resolution(plain, dpi)
    assert "dpi" not in Image.open(io.BytesIO(plain)).info
    picture = Image.open(io.BytesIO(sized))
    picture.verify()  # checks the sum of every chunk
    assert picture.info["dpi"] == pytest.approx((dpi, dpi), abs=0.02)
    assert Image.open(io.BytesIO(sized)).tobytes() == Image.open(io.BytesIO(plain)).tobytes()


def test_where_the_fonts_are_is_said_as_it_is() -> None:
    assert "in the SVG as a subset for browsers" in _font_words(["Arial, embedded as a subset"])
    told = _font_words(["Arial, embedded as a subset", "not embedded: pip install fonttools"])
    assert "in the SVG they are not embedded: pip install fonttools." in told
    assert "subset" not in told


def test_images_of_an_earlier_report_do_not_go_unsaid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without new images the old ones go, whether none were asked for or none could be made; an edited one stays."""
    document = Document("t", (), ())
    made = {f"{FOLDER}/figure-1-single.{ending}": b"x" for ending in ("svg", "pdf", "png")}
    for asked in (False, True):
        folder = tmp_path / str(asked)
        monkeypatch.setattr(report, "make_images", lambda *_: Images(files=made))
        assert "of an earlier report" not in write_document(document, folder).read_text("utf-8")
        (folder / FOLDER / "figure-1-single.svg").write_text("edited by hand")
        monkeypatch.setattr(report, "make_images", lambda *_: Images(words="No images were made: none."))
        write_document(document, folder, images=asked)
        for name in ("index.html", "report.md", "report.json"):
            said = (folder / name).read_text("utf-8")
            assert "2 images of an earlier report, of its figures, removed" in said
            assert ("No images were made" in said) == asked
        assert [path.name for path in (folder / FOLDER).iterdir()] == ["figure-1-single.svg"]


@needs_browser
def test_a_report_has_its_figures_for_print(figure: go.Figure, tmp_path: Path) -> None:
    wide = finish(go.Figure(), title="t", alt="a", table=shared.costs(), height=200, width=900)
    document = Document("t", (), (Section("s", (Figure("one", figure), Figure("two", wide))),))
    told: list[tuple[int, int]] = []
    page = write_document(document, tmp_path / "r", progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    names = {path.name for path in (tmp_path / "r" / "figures").iterdir()}
    both = {f"figure-1-{column}.{ending}" for column in ("single", "double") for ending in ("svg", "pdf", "png")}
    assert names == both | {f"figure-2-double.{ending}" for ending in ("svg", "pdf", "png")}
    source = page.read_text("utf-8")
    assert source.count('<a href="figures/') == 9
    assert "single column, 88 × " in source
    assert "600 dots an inch" in source
    assert "![Figure 1](figures/figure-1-single.png)" in (tmp_path / "r" / "report.md").read_text("utf-8")
    data = json.loads((tmp_path / "r" / "report.json").read_text("utf-8"))
    assert len(data["sections"][0]["blocks"][0]["images"]) == 6


@pytest.mark.parametrize("missing", ["kaleido", "browser"])
def test_without_kaleido_or_a_browser_the_report_says_how_to_get_images(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "kaleido":
        monkeypatch.setitem(sys.modules, "kaleido", None)
    else:
        monkeypatch.setenv("CHROMIUM", str(tmp_path / "no-such-browser"))
    page = write_document(compose(gather([postmortems.remedy()])), tmp_path / "r")
    source = page.read_text("utf-8")
    assert "No images were made: " in source
    assert "apt-get install chromium" in source
    assert "pip install kaleido" in source
    assert not (tmp_path / "r" / "figures").exists()
    assert source.count("plotly-graph-div") == 1, "the page's own figure is there"


def test_a_browser_that_does_not_start_is_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CHROMIUM", str(broken))
    with pytest.raises(NoImages, match="the browser"), ImageBrowser():
        pass


def test_fonts_that_may_not_be_embedded_are_not(tmp_path: Path) -> None:
    one = svg_fonts.face()
    if one is None:
        pytest.skip("fontconfig is not installed: apt-get install fontconfig")
    found = svg_fonts.subset(one, set("step 15"))
    assert found is not None
    assert found[:4] == b"wOFF"
    assert len(found) < 20_000 < one.file.stat().st_size
    from fontTools.ttLib import TTFont

    font = TTFont(io.BytesIO(found))
    assert set(font.getBestCmap()) == {ord(letter) for letter in "step 15"}
    with TTFont(one.file, fontNumber=one.index) as whole:
        whole["OS/2"].fsType = 2
        whole.save(tmp_path / "restricted.ttf")
    assert svg_fonts.subset(replace(one, file=tmp_path / "restricted.ttf", index=0), set("a")) is None


def test_without_fontconfig_or_fonttools_the_svg_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    svg = '<svg class="x"><text style="font-weight: bold">a</text></svg>'
    with monkeypatch.context() as patch:
        patch.setattr(svg_fonts, "face", lambda bold=False: None)
        assert svg_fonts.embed(svg) == (
            svg,
            "not embedded: fontconfig is not installed, so the font's file is not known",
        )
        assert svg_fonts.family().startswith("Arial, Helvetica")
    if svg_fonts.face() is not None:
        whole, words = svg_fonts.embed(svg)
        assert whole.count("@font-face") == 2, "bold letters have a face of their own"
        assert words.endswith("embedded as a subset")
        monkeypatch.setitem(sys.modules, "fontTools.subset", None)
        assert svg_fonts.embed(svg)[1] == "not embedded: pip install fonttools"
