"""One page of HTML that needs nothing beside it: a verdict, and tables that a script sorts and filters.

Names in checkpoints are hostile. Jinja escapes all text, rows are JSON in which no tag can begin, the script
writes text alone, and the page's own policy lets it load nothing and run no other script.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from qload.errors import ArgumentError
from qload.pictures.markdown import markdown_html

FOLDER = "qload.pictures.template"
LONGEST = 4000  # characters of a text


@dataclass(frozen=True)
class ReportTable:
    """Rows that are sorted and filtered in the browser.

    `columns`: their titles; `numbers`: which of them are sorted as numbers; `links`: the one whose text is
    also the `id` of an explanation on the page, or "". `rows`: a value for each column, None: there is none.
    `drawn`: columns whose texts are drawn, as "bars" or as a "map", see `qload.pictures.values`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | int | None]]
    numbers: Sequence[str] = ()
    links: str = ""
    drawn: Mapping[str, str] = field(default_factory=dict)

    def filled(self) -> "ReportTable":
        """Without the columns, but for the first, in which no row has a value."""
        held = [
            at for at in range(len(self.columns)) if not at or any(row[at] is not None for row in self.rows)
        ]
        names = [self.columns[at] for at in held]
        return replace(
            self,
            columns=names,
            rows=[[row[at] for at in held] for row in self.rows],
            numbers=[name for name in self.numbers if name in names],
            drawn={name: how for name, how in self.drawn.items() if name in names},
        )


@dataclass(frozen=True)
class Page:
    """What a page says.

    `facts`: beside the verdict, by name; `shares`: parts of one bar, in bytes; `explanations`: Markdown by
    `id`; `drawings`: by name, SVG that holds nothing of a file.
    """

    title: str
    verdict: str
    facts: Mapping[str, str]
    tables: Sequence[ReportTable]
    notes: Sequence[str] = ()
    shares: Mapping[str, int] = field(default_factory=dict)
    explanations: Mapping[str, str] = field(default_factory=dict)
    drawings: Mapping[str, str] = field(default_factory=dict)

    def html(self) -> str:
        """The page; ArgumentError where Jinja is not installed."""
        try:
            from jinja2 import Environment, StrictUndefined
        except ModuleNotFoundError as error:
            raise ArgumentError(
                "html", 'Jinja, as `pip install "qload-weights[pictures]"` brings', "none"
            ) from error
        tables = [table.filled() for table in self.tables]
        total = sum(self.shares.values())
        parts = [(name, size, 100 * size / total) for name, size in self.shares.items() if size]
        template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
            _file("page.html.jinja")
        )
        return template.render(
            page=replace(self, tables=tables),
            shown=shown,
            explained={
                name: markdown_html(shown(text), tuple(self.explanations))
                for name, text in self.explanations.items()
            },
            parts=parts,
            data=_data(tables),
            style=_file("page.css"),
            script=_file("page.js"),
            script_hash=_hash(_file("page.js")),
            style_hash=_hash(_file("page.css")),
        )


def shown(text: object) -> str:
    """Text that is printed as it is read: controls, and what turns direction, as Python writes them."""
    told = str(text)
    told = told if len(told) <= LONGEST else f"{told[:LONGEST]}... ({len(told)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in told)


def _data(tables: Sequence[ReportTable]) -> str:
    """As JSON within a script element, which ends at no text of it."""
    found: list[dict[str, Any]] = [
        {
            "columns": list(table.columns),
            "numbers": [table.columns.index(name) for name in table.numbers],
            "drawn": {table.columns.index(name): how for name, how in table.drawn.items()},
            "link": table.columns.index(table.links) if table.links else -1,
            "rows": [[shown(cell) if isinstance(cell, str) else cell for cell in row] for row in table.rows],
        }
        for table in tables
    ]
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """Of an element's text, by which the policy of a page allows it. Source: W3C, CSP Level 3."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _file(name: str) -> str:
    return resources.files(FOLDER).joinpath(name).read_text("utf-8")
