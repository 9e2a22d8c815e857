"""The HTML report: one self-contained page, sortable and filterable."""

from __future__ import annotations

import html
import json
from pathlib import Path

from . import report as reports


def page(report: reports.Report) -> str:
    """The page's text: `page.html` with the run's data put in."""
    template = (Path(__file__).parent / "page.html").read_text()
    data = json.dumps(reports.to_json(report), separators=(",", ":"))
    # "</script>" inside a string would end the script element.
    return template.replace("{{title}}", html.escape(f"{report.backend}: operator conformance")).replace(
        "{{data}}", data.replace("</", "<\\/")
    )


def write_html(report: reports.Report, path: Path) -> None:
    """The report as one HTML file."""
    path.write_text(page(report))
