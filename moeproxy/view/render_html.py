"""A document as one HTML page that needs no network: plotly.js is inlined once, styles too."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import count

import plotly.graph_objects as go
from plotly.io import to_html
from plotly.offline import get_plotlyjs

from moeproxy.view.document import Block, Document, Figure, Heading, Points, Section, Table, Text, cell
from moeproxy.view.report_images import Image, Images
from moeproxy.view.style import data_table, describe

_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "displayModeBar": False,
    "toImageButtonOptions": {"format": "svg"},
}

_STYLE = """
:root { --ink: #222; --soft: #55606b; --line: #d9dfe5; --wash: #f5f7f9; --blue: #0072b2; --vermillion:
#b34700; } * { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header, main, footer { max-width: 1240px; margin: 0 auto; padding: 0 28px; }
header { padding-top: 34px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 14px; }
h3 { font-size: 18px; margin: 34px 0 8px; }
h2 { font-size: 22px; margin: 52px 0 12px; padding-top: 18px; border-top: 1px solid var(--line); }
p, li { max-width: 82ch; }
.lead { background: var(--wash); border-left: 4px solid var(--blue); padding: 12px 18px; margin: 18px 0; }
.lead p { margin: 6px 0; }
.note { color: var(--soft); border-left: 4px solid var(--line); padding: 4px 14px; }
nav ul { display: flex; flex-wrap: wrap; gap: 6px 18px; list-style: none; padding: 0; margin: 12px 0 0; }
a { color: var(--blue); text-underline-offset: 3px; }
figure { margin: 22px 0; }
.plot { overflow-x: auto; }
figcaption { color: var(--soft); max-width: 95ch; }
.scroll { overflow: auto; max-height: 460px; margin: 10px 0; width: fit-content; max-width: 100%; border: 1px
solid var(--line); border-radius: 4px; } .scroll:focus-visible, a:focus-visible, summary:focus-visible {
outline: 3px solid var(--blue); outline-offset: 2px; } .tall { max-height: none; }
table { border-collapse: collapse; font-size: 14.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 8px 10px; }
th, td { padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
thead th { background: var(--wash); position: sticky; top: 0; vertical-align: bottom; }
thead th.number { text-align: right; }
td.short { white-space: nowrap; }
tbody th { font-weight: 600; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
details { margin: 8px 0 18px; }
summary { cursor: pointer; color: var(--blue); padding: 4px 0; }
.tag { display: inline-block; border: 1px solid currentColor; border-radius: 3px; padding: 0 6px; font-size:
  13px; white-space: nowrap; color: var(--soft); }
.tag.live { color: var(--vermillion); font-weight: 600; }
footer { color: var(--soft); padding-bottom: 40px; font-size: 14px; }
@media (max-width: 760px) { header, main, footer { padding-left: 14px; padding-right: 14px; } h1 { font-size:
25px; } } @media print { nav { display: none; } .scroll { max-height: none; overflow: visible; } }
"""

_TAGS = {"live": '<span class="tag live">live</span>', "recorded": '<span class="tag">recorded</span>',
         "file": '<span class="tag">file</span>'}  # fmt: skip


def render_html(document: Document, images: Images | None = None) -> str:
    """Return the page; images of its figures are linked, not held."""
    numbers, made = count(1), images or Images()
    body = "".join(_section(section, numbers, made) for section in document.sections)
    told = f"<p>{_text(made.words)}</p>" if made.words else ""
    links = "".join(f'<li><a href="#{s.anchor}">{_text(s.title)}</a></li>' for s in document.sections)
    lead = "".join(f"<p>{_text(sentence)}</p>" for sentence in document.lead)
    title = _text(document.title)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
<script>{get_plotlyjs()}</script>
</head>
<body>
<header>
<h1>{title}</h1>
<div class="lead">{lead}</div>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<noscript><p>The figures need JavaScript; the table below each of them holds the same numbers.</p></noscript>
</header>
<main>
{body}</main>
<footer>{told}<p>Written by moeproxy. The same numbers are in report.md and report.json beside this page.</p></footer>
</body>
</html>
"""


def _section(section: Section, numbers: count[int], images: Images) -> str:
    blocks = "\n".join(_block(block, numbers, images) for block in section.blocks)
    heading = f'<h2 id="{section.anchor}">{_text(section.title)}</h2>'
    return f'<section aria-labelledby="{section.anchor}">{heading}\n{blocks}\n</section>\n'


def _block(block: Block, numbers: count[int], images: Images) -> str:
    if isinstance(block, Text):
        return f'<p class="note">{_text(block.text)}</p>' if block.note else f"<p>{_text(block.text)}</p>"
    if isinstance(block, Heading):
        return f"<h3>{_text(block.text)}</h3>"
    if isinstance(block, Points):
        return "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in block.items) + "</ul>"
    if isinstance(block, Table):
        table = _table(block, tall=not block.folded)
        return _folded(block.caption, table) if block.folded else table
    number = next(numbers)
    return _figure(block, number, images.of.get(number, ()))


def _folded(summary: str, inside: str, open_: bool = False) -> str:
    return f"<details{' open' if open_ else ''}><summary>{_text(summary)}</summary>{inside}</details>"


def _figure(block: Figure, number: int, images: Sequence[Image]) -> str:
    width = block.figure.layout.meta["min_width"]  # pyright: ignore[reportAttributeAccessIssue]
    bare = go.Figure(block.figure).update_layout(meta=None)  # the table below says the same
    plot = to_html(bare, full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=f"plot-{number}")
    alt = html.escape(describe(block.figure), quote=True)
    table = _table(Table(f"Data of figure {number}", data_table(block.figure)), tall=False)
    folded = _folded(f"Data of figure {number} as a table", table, block.open)
    said = f"{_text(block.caption)} {_text(describe(block.figure))}"
    return (
        f'<figure><div class="plot"><div role="img" aria-label="{alt}" style="min-width:{width}px">'
        f"{plot}</div></div>"
        f"<figcaption><strong>Figure {number}.</strong> {said}{_links(images)}</figcaption>{folded}</figure>"
    )


def _links(images: Sequence[Image]) -> str:
    """Return links to the images of a figure, in print size."""
    parts = []
    for column in dict.fromkeys(image.column for image in images):
        here = [image for image in images if image.column == column]
        size = f"{column.name} column, {column.mm:g} × {here[0].height_mm:.0f} mm"
        links = " · ".join(f'<a href="{_text(one.path)}">{one.format.upper()}</a>' for one in here)
        parts.append(f"{links} ({size})")
    return f'<br><span class="images">For print: {"; ".join(parts)}.</span>' if parts else ""


def _table(block: Table, tall: bool) -> str:
    rows = block.frame.astype(object).to_numpy().tolist()
    head = "".join(_head(str(name), rows, i) for i, name in enumerate(block.frame.columns))
    body = "".join(_row(row) for row in rows)
    label = html.escape(block.caption, quote=True)
    size = "scroll tall" if tall else "scroll"
    return (
        f'<div class="{size}" role="region" aria-label="{label}" tabindex="0"><table>'
        f"<caption>{_text(block.caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(values: list[object]) -> str:
    first, *rest = values
    return f'<tr><th scope="row">{_value(first)}</th>{"".join(_cell(value) for value in rest)}</tr>'


def _head(name: str, rows: list[list[object]], column: int) -> str:
    number = column > 0 and bool(rows) and _is_number(rows[0][column])
    return f'<th scope="col"{" class=number" if number else ""}>{_text(name)}</th>'


def _cell(value: object) -> str:
    # Short entries such as an interval or a verdict stay on one line; sentences wrap.
    kind = "number" if _is_number(value) else "short" if len(cell(value)) <= 24 else ""
    return f'<td class="{kind}">{_value(value)}</td>' if kind else f"<td>{_value(value)}</td>"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(value: object) -> str:
    text = cell(value)
    if isinstance(value, str) and set(value.split(" + ")) <= set(_TAGS):
        return " ".join(_TAGS[part] for part in value.split(" + "))
    return _text(text)


def _text(text: str) -> str:
    return html.escape(text, quote=False)
