"""A document as Markdown and as JSON, with the numbers of the HTML page."""

from __future__ import annotations

import json

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
from moeproxy.view.style import data_table, describe

FORMAT = "moeproxy.report"
VERSION = 1


def render_markdown(document: Document) -> str:
    """Return the report as Markdown; figures are given as their description and their data."""
    parts = [f"# {document.title}", *(f"> {sentence}" for sentence in document.lead)]
    for section in document.sections:
        parts.append(f"## {section.title}")
        parts += [_block(block) for block in section.blocks]
    return "\n\n".join(parts) + "\n"


def render_json(document: Document) -> str:
    """Return the report as JSON: every block, then the numbers for machines."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "title": document.title,
        "lead": list(document.lead),
        "sections": [_json_section(section) for section in document.sections],
        **document.data,
    }
    return json.dumps(plain(data), indent=1, allow_nan=False) + "\n"


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"*{block.text}*" if block.note else block.text
    if isinstance(block, Heading):
        return f"### {block.text}"
    if isinstance(block, Points):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Table):
        return f"**{block.caption}**\n\n{_table(block)}"
    table = _table(Table("", data_table(block.figure)))
    return f"**Figure.** {block.caption} {describe(block.figure)}\n\n{table}"


def _table(block: Table) -> str:
    names = [_safe(str(name)) for name in block.frame.columns]
    rows = [[_safe(cell(value)) for value in row] for row in block.frame.astype(object).to_numpy().tolist()]
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _safe(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _json_section(section: Section) -> dict[str, object]:
    return {"title": section.title, "blocks": [_json_block(block) for block in section.blocks]}


def _json_block(block: Block) -> dict[str, object]:
    if isinstance(block, Text | Heading):
        return {"text": block.text}
    if isinstance(block, Points):
        return {"points": list(block.items)}
    if isinstance(block, Table):
        return {"table": block.caption, "rows": records(block.frame)}
    alt, table = describe(block.figure), data_table(block.figure)
    return {"figure": block.caption, "description": alt, "rows": records(table)}
