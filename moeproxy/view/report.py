"""One report from result objects: HTML page, Markdown and JSON with the same numbers."""

from __future__ import annotations

from pathlib import Path

from moeproxy.errors import MoeproxyError
from moeproxy.files import atomic_file
from moeproxy.view.render_html import render_html
from moeproxy.view.render_text import render_json, render_markdown
from moeproxy.view.report_input import ReportInput
from moeproxy.view.sections import compose

__all__ = ["ReportInput", "write_report"]


def write_report(result: ReportInput, out: str | Path) -> Path:
    """Write `out/report/index.html`, `report.md` and `report.json`; return the path of the page.

    Each file appears complete or not at all; an older report is replaced.

    Args:
        result: what to report.
        out: directory for results.

    Raises:
        MoeproxyError: the directory cannot be written.

    Example:
        >>> write_report(ReportInput(comparisons=compare_all(traces)), "out")
        PosixPath('out/report/index.html')
    """
    document = compose(result)
    folder = Path(out) / "report"
    files = {
        "report.json": render_json(document),
        "report.md": render_markdown(document),
        "index.html": render_html(document),
    }
    try:
        for name, text in files.items():
            with atomic_file(folder / name) as temporary:
                temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MoeproxyError(
            f"the report cannot be written ({error.strerror or error})",
            where=folder,
            expected="a writable directory with room for about 6 MB",
            remedy="choose another output directory or free some space",
        ) from error
    return folder / "index.html"
