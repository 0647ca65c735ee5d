"""A document as Markdown and as JSON, with the numbers of the HTML page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count

from moeproxy.triage.jsonable import plain
from moeproxy.view.document import (
    Block,
    Document,
    Heading,
    Points,
    Section,
    Table,
    Text,
    cell,
    records,
)
from moeproxy.view.report_images import Images
from moeproxy.view.style import data_table, describe

FORMAT = "moeproxy.report"
VERSION = 1
_OPENS = re.compile(r"#|>|[-+*] |\d+[.)] ")


def render_markdown(document: Document, images: Images | None = None) -> str:
    """Return the report as Markdown; figures are given as their description, their data and their images."""
    made, numbers = images or Images(), count(1)
    parts = [f"# {_plain(document.title)}", *(f"> {_plain(sentence)}" for sentence in document.lead)]
    for section in document.sections:
        parts.append(f"## {_plain(section.title)}")
        parts += [_block(block, numbers, made) for block in section.blocks]
    parts += [f"*{_plain(made.words)}*"] if made.words else []
    return "\n\n".join(parts) + "\n"


def render_json(document: Document, images: Images | None = None) -> str:
    """Return the report as JSON: every block, then the numbers for machines."""
    made, numbers = images or Images(), count(1)
    data = {
        "format": FORMAT,
        "version": VERSION,
        "title": document.title,
        "lead": list(document.lead),
        "sections": [_json_section(section, numbers, made) for section in document.sections],
        "images": made.words,
        **document.data,
    }
    return json.dumps(plain(data), indent=1, allow_nan=False) + "\n"


def _block(block: Block, numbers: Iterator[int], images: Images) -> str:
    if isinstance(block, Text):
        return f"*{_plain(block.text)}*" if block.note else _plain(block.text)
    if isinstance(block, Heading):
        return f"### {_plain(block.text)}"
    if isinstance(block, Points):
        return "\n".join(f"- {_plain(item)}" for item in block.items)
    if isinstance(block, Table):
        return f"**{_plain(block.caption)}**\n\n{_table(block)}"
    number = next(numbers)
    table = _table(Table("", data_table(block.figure)))
    shown = "".join(f"![Figure {number}]({one.path})\n\n" for one in images.of.get(number, ()) if one.format == "png")
    first = shown.split("\n\n")[0]
    head = f"{first}\n\n" if first else ""
    return f"{head}**Figure {number}.** {_plain(block.caption)} {_plain(describe(block.figure))}\n\n{table}"


def _table(block: Table) -> str:
    names = [_safe(str(name)) for name in block.frame.columns]
    rows = [[_safe(cell(value)) for value in row] for row in block.frame.astype(object).to_numpy().tolist()]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _safe(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Return text of which Markdown makes no tag, link or block of its own: it may come from a log or a user."""
    one_line = " ".join(text.split())
    safe = one_line.replace("<", "\\<").replace("](", "]\\(").replace("`", "\\`")
    return f"\\{safe}" if _OPENS.match(safe) else safe


def _json_section(section: Section, numbers: Iterator[int], images: Images) -> dict[str, object]:
    return {"title": section.title, "blocks": [_json_block(block, numbers, images) for block in section.blocks]}


def _json_block(block: Block, numbers: Iterator[int], images: Images) -> dict[str, object]:
    if isinstance(block, Text | Heading):
        return {"text": block.text}
    if isinstance(block, Points):
        return {"points": list(block.items)}
    if isinstance(block, Table):
        return {"table": block.caption, "rows": records(block.frame)}
    number = next(numbers)
    alt, table = describe(block.figure), data_table(block.figure)
    paths = [one.path for one in images.of.get(number, ())]
    return {"figure": block.caption, "number": number, "description": alt, "rows": records(table), "images": paths}
