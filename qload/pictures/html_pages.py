"""Reports as one page of HTML: tables that a script sorts and filters, and no external file.

Names in checkpoints are hostile. Jinja escapes all text, table rows are JSON without `<`, the script inserts
text only, and the content security policy of the page allows no other script and no request.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from qload.checkpoint import format_label
from qload.errors import ArgumentError
from qload.errors.reporting import CauseGroup, group_texts
from qload.errors.rules import rule_pages
from qload.pictures.drawing import draw_formats
from qload.pictures.histograms import LayerPictures
from qload.plan import ExplainedLayer, Explanation
from qload.verify import Report
from qload.verify.report import Finding, group_findings, shown_message

FENCE = "```"
INLINE = re.compile(r"`([^`]+)`|(?<!\w)\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\w)|\[([^\]]+)\]\(([^()\s]+)\)")
RULE_LINK = re.compile(r"([a-z0-9-]+)\.md")
TABLE_LINE = re.compile(r"[|\s:-]+")  # below the titles of a table
MAX_TEXT_CHARACTERS = 4000
FINDING_COLUMNS = ("rule", "severity", "tensor", "places", "file", "message", "remedy")
LAYER_COLUMNS = (
    "layer", "format", "bits", "group size", "symmetric", "act order", "N", "K", "dtype", "scales",
    "sizes of scales", "error", "bytes", "findings",
)  # fmt: skip
PICTURE_COLUMNS = {"sizes of scales": "bars", "error": "map"}
NUMBER_COLUMNS = ("bits", "group size", "N", "K", "bytes", "findings")
REASONS_COLUMN = "reasons against others"
Cell = str | int | None


def markdown_html(text: str, rules: Sequence[str] = ()) -> str:
    """Convert Markdown of a rule page to HTML; a link to one of `rules` becomes a link within the page.

    Supported: paragraphs, lists, tables, blocks of code, `code`, **bold** and links. Text is escaped first,
    so it can contain no tag. Other links become plain text, because the page refers to nothing external.
    """
    return "\n".join(_block_elements(text.split("\n"), lambda line: _inline_markup(line, rules)))


def _block_elements(lines: Sequence[str], inline: Callable[[str], str]) -> Iterator[str]:
    start = 0
    while start < len(lines):
        line = lines[start]
        end = start + 1
        if line.startswith(FENCE):
            while end < len(lines) and not lines[end].startswith(FENCE):
                end += 1
            yield f"<pre><code>{escape(chr(10).join(lines[start + 1 : end]))}</code></pre>"
            end += 1
        elif line.startswith("- "):
            while end < len(lines) and lines[end].startswith("- "):
                end += 1
            items = (f"<li>{inline(item[2:])}</li>" for item in lines[start:end])
            yield f"<ul>{''.join(items)}</ul>"
        elif line.startswith("|"):
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield _table_element(lines[start:end], inline)
        elif line.strip():
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(("- ", "|", FENCE)):
                end += 1
            yield f"<p>{inline(' '.join(lines[start:end]))}</p>"
        start = end


def _table_element(lines: Sequence[str], inline: Callable[[str], str]) -> str:
    rows = [
        [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]
        for line in lines
        if not TABLE_LINE.fullmatch(line)
    ]
    head, *body = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _inline_markup(text: str, rules: Sequence[str]) -> str:
    parts, end = [], 0
    for match in INLINE.finditer(text):
        parts.append(escape(text[end : match.start()]))
        code, bold, title, target = match.groups()
        if code is not None:
            parts.append(f"<code>{escape(code)}</code>")
        elif bold is not None:
            parts.append(f"<strong>{_inline_markup(bold, rules)}</strong>")
        else:
            rule = RULE_LINK.fullmatch(target)
            is_known = rule is not None and rule[1] in rules
            parts.append(f'<a href="#{rule[1]}">{escape(title)}</a>' if rule and is_known else escape(title))
        end = match.end()
    return "".join([*parts, escape(text[end:])])


@dataclass(frozen=True)
class ReportTable:
    """Table of a report, sorted and filtered in the browser.

    Attributes
    ----------
    title, columns, rows
        Title, titles of the columns, and a value per column, or None.
    numbers
        Columns to sort as numbers.
    links
        Column with ids of explanations on the page, or "".
    drawn
        Column -> "bars" or "map", the drawing of its texts; see `qload.pictures.histograms`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: Sequence[str] = ()
    links: str = ""
    drawn: Mapping[str, str] = field(default_factory=dict)

    def without_empty_columns(self) -> "ReportTable":
        """Return the table without the columns that have no value in any row; the first column stays."""
        kept = [i for i in range(len(self.columns)) if not i or any(row[i] is not None for row in self.rows)]
        names = [self.columns[i] for i in kept]
        return replace(
            self,
            columns=names,
            rows=[[row[i] for i in kept] for row in self.rows],
            numbers=[name for name in self.numbers if name in names],
            drawn={name: kind for name, kind in self.drawn.items() if name in names},
        )


@dataclass(frozen=True)
class Page:
    """Content of a page.

    Attributes
    ----------
    title, verdict, facts, tables, notes
        Title, verdict, name -> fact, tables, and notes.
    shares
        Name -> bytes, the parts of a bar.
    explanations
        Id -> Markdown.
    drawings
        Name -> SVG without text of a checkpoint.
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
        """Return the page; ArgumentError if Jinja is not installed."""
        try:
            from jinja2 import Environment, StrictUndefined
        except ModuleNotFoundError as error:
            expected = 'Jinja, installed by `pip install "qload-weights[pictures]"`'
            raise ArgumentError("html", expected, "none") from error
        tables = [table.without_empty_columns() for table in self.tables]
        total = sum(self.shares.values())
        parts = [(name, size, 100 * size / total) for name, size in self.shares.items() if size]
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        return environment.from_string(_read_template("page.html.jinja")).render(
            page=replace(self, tables=tables),
            shown=escape_controls,
            explained={
                name: markdown_html(escape_controls(text), tuple(self.explanations))
                for name, text in self.explanations.items()
            },
            parts=parts,
            data=_tables_json(tables),
            style=_read_template("page.css"),
            script=_read_template("page.js"),
            script_hash=_csp_hash(_read_template("page.js")),
            style_hash=_csp_hash(_read_template("page.css")),
        )


def escape_controls(text: object) -> str:
    """Escape control characters and changes of text direction as Python does; cut a long text."""
    printed = str(text)
    if len(printed) > MAX_TEXT_CHARACTERS:
        printed = f"{printed[:MAX_TEXT_CHARACTERS]}... ({len(printed)} characters)"
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in printed)


def _tables_json(tables: Sequence[ReportTable]) -> str:
    """Format tables as JSON for a script element; `<` is escaped, so no text can close the element."""
    data: list[dict[str, Any]] = [
        {
            "columns": list(table.columns),
            "numbers": [table.columns.index(name) for name in table.numbers],
            "drawn": {table.columns.index(name): kind for name, kind in table.drawn.items()},
            "link": table.columns.index(table.links) if table.links else -1,
            "rows": [
                [escape_controls(cell) if isinstance(cell, str) else cell for cell in row]
                for row in table.rows
            ],
        }
        for table in tables
    ]
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _csp_hash(text: str) -> str:
    """Hash an inline script or style for the content security policy. Source: W3C, CSP Level 3."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _read_template(name: str) -> str:
    return resources.files("qload.pictures").joinpath("template", name).read_text("utf-8")


def report_page(report: Report, pictures: Mapping[str, LayerPictures] | None = None) -> str:
    """Format a report of `verify` as a self-contained HTML page; each finding links to its rule.

    `pictures`: name of a layer -> its pictures, from `layer_pictures`.
    """
    rules = {finding.rule for finding in report.findings}
    groups = group_findings(report.findings)
    facts = {"checkpoint": report.path, "findings": str(len(groups)), "layers": str(len(report.layers))}
    facts |= {str(name): str(value) for name, value in report.claims.items()}
    findings = ReportTable(
        "Findings", FINDING_COLUMNS, list(map(_finding_row, groups)), numbers=("places",), links="rule"
    )
    layers = ReportTable(
        "Layers",
        LAYER_COLUMNS,
        _layer_rows(report, pictures or {}),
        numbers=NUMBER_COLUMNS,
        drawn=PICTURE_COLUMNS,
    )
    return Page(
        title="qload verify",
        verdict=report.verdict,
        facts=facts,
        tables=[findings, layers],
        notes=group_texts(report.notes),
        shares=_coverage_shares(report),
        explanations={
            rule: f"{page['what']}\n\n**Why it matters.** {page['why']}\n\n**Remedy.** {page['do']}"
            for rule, page in rule_pages().items()
            if rule in rules
        },
        drawings=draw_formats((layer.format, layer.bits) for layer in report.layers),
    ).html()


def _finding_row(group: CauseGroup[Finding]) -> list[Cell]:
    """Format the findings of one cause, with their file if it is the same for all."""
    first, files = group.first, {finding.file for finding in group.items}
    tensors = "\n".join(group.places(None)) if first.tensor else None
    file = first.file if len(files) == 1 else None
    count = group.count if group.count > 1 else None
    return [first.rule, first.severity, tensors, count, file, shown_message(group), first.remedy or None]


def _layer_rows(report: Report, pictures: Mapping[str, LayerPictures]) -> list[Sequence[Cell]]:
    """Format a row per layer, with the number of findings about its tensors."""
    counts: dict[str, int] = {}
    prefixes = {layer.prefix for layer in report.layers}
    for finding in report.findings:
        prefix = finding.tensor or ""
        while prefix and prefix not in prefixes:
            prefix = prefix.rpartition(".")[0]
        counts[prefix] = counts.get(prefix, 0) + 1
    no_pictures = LayerPictures()
    return [
        [
            layer.prefix,
            layer.format and format_label(layer.format),
            layer.bits,
            layer.group_size,
            _yes_or_no(layer.sym),
            _yes_or_no(layer.act_order),
            *_two_sizes(layer.shape),
            layer.dtype,
            layer.scale_dtype,
            pictures.get(layer.prefix, no_pictures).scales or None,
            pictures.get(layer.prefix, no_pictures).error or None,
            layer.bytes,
            counts.get(layer.prefix, 0),
        ]
        for layer in report.layers
    ]


def _two_sizes(shape: Sequence[int]) -> tuple[Cell, Cell]:
    return shape[0] if shape else None, shape[1] if len(shape) > 1 else None


def _yes_or_no(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _coverage_shares(report: Report) -> Mapping[str, int]:
    """Divide the bytes of a checkpoint by their use."""
    coverage = report.coverage
    if coverage is None:
        return {}
    return {
        "read": coverage.read,
        "exempt, for a reason": sum(coverage.exempt.values()),
        "not read by any format": coverage.unread,
        "of refused layers": coverage.refused,
        "unexplained": coverage.unexplained,
    }


def explanation_page(explanation: Explanation) -> str:
    """Format an explanation of `explain` as a self-contained HTML page."""
    layers = explanation.layers
    counts = list(dict.fromkeys(choice.tokens for layer in layers for choice in layer.choices))
    titles = ["1 token" if count == 1 else f"{count} tokens" for count in counts]
    columns = [
        "layer",
        "format",
        "N",
        "K",
        "kernel format",
        *titles,
        REASONS_COLUMN,
        "changes for others",
        "error",
    ]
    facts = {
        "checkpoint": explanation.path,
        "chip": explanation.arch,
        "ranks": str(explanation.tp),
        "activations": explanation.dtype,
        "layers": str(len(layers)),
    }
    if explanation.unreadable or explanation.unsupported:
        facts[explanation.verdict] = explanation.unreadable or explanation.unsupported
    rows = [_explained_row(layer, counts) for layer in layers]
    formats = [(name, layer.bits) for layer in layers for name in (layer.format, layer.kernel_format)]
    return Page(
        title="qload explain",
        verdict=explanation.verdict,
        facts=facts,
        tables=[ReportTable("Layers", columns, rows, numbers=("N", "K"))],
        notes=explanation.notes,
        drawings=draw_formats(formats),
    ).html()


def _explained_row(layer: ExplainedLayer, counts: Sequence[int]) -> list[Cell]:
    kernels = {choice.tokens: f"{choice.kernel}, {choice.time}" for choice in layer.choices}
    reasons = [*layer.formats.items(), *(item for choice in layer.choices for item in choice.refused.items())]
    return [
        layer.prefix,
        layer.format and format_label(layer.format),
        *_two_sizes(layer.shape),
        layer.kernel_format,
        *(kernels.get(count) for count in counts),
        "\n".join(dict.fromkeys(f"{name}: {reason}" for name, reason in reasons)) or None,
        "\n".join(layer.changes) or None,
        layer.error or None,
    ]
