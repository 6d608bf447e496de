"""Reports as one page of HTML: tables that a script sorts and filters, and no external file.

Names in checkpoints are hostile. Jinja escapes all text, table rows are JSON without `<`, the script inserts
text only, and the content security policy of the page allows no other script and no request.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
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
PICTURE_COLUMNS = {"sizes of scales": "bars", "error": "map"}
NUMBER_COLUMNS = ("bits", "group size", "N", "K", "bytes", "findings")
Cell = str | int | None
Row = Mapping[str, Cell]


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
    title, rows
        Title, and rows of values, or None, by titles of columns.
    numbers
        Columns to sort as numbers.
    links
        Column with ids of explanations on the page, or "".
    drawn
        Column -> "bars" or "map", the drawing of its texts; see `qload.pictures.histograms`.
    """

    title: str
    rows: Sequence[Row]
    numbers: Sequence[str] = ()
    links: str = ""
    drawn: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def columns(self) -> list[str]:
        """Titles of the columns: the first, and all that have a value in any row."""
        names = list(self.rows[0]) if self.rows else []
        return [name for name in names if name == names[0] or any(row[name] is not None for row in self.rows)]


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
        total = sum(self.shares.values())
        parts = [(name, size, 100 * size / total) for name, size in self.shares.items() if size]
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        return environment.from_string(_read_template("page.html.jinja")).render(
            page=self,
            shown=escape_controls,
            explained={
                name: markdown_html(escape_controls(text), tuple(self.explanations))
                for name, text in self.explanations.items()
            },
            parts=parts,
            data=_tables_json(self.tables),
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
            "columns": table.columns,
            "numbers": [at for at, name in enumerate(table.columns) if name in table.numbers],
            "drawn": {at: table.drawn[name] for at, name in enumerate(table.columns) if name in table.drawn},
            "link": table.columns.index(table.links) if table.links in table.columns else -1,
            "rows": [
                [escape_controls(cell) if isinstance(cell, str) else cell for cell in cells]
                for cells in (map(row.get, table.columns) for row in table.rows)
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
    findings = ReportTable("Findings", list(map(_finding_row, groups)), numbers=("places",), links="rule")
    rows = _layer_rows(report, pictures or {})
    layers = ReportTable("Layers", rows, numbers=NUMBER_COLUMNS, drawn=PICTURE_COLUMNS)
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


def _finding_row(group: CauseGroup[Finding]) -> Row:
    """Format the findings of one cause, with their file if it is the same for all."""
    first, files = group.first, {finding.file for finding in group.items}
    return {
        "rule": first.rule,
        "severity": first.severity,
        "tensor": "\n".join(group.places(None)) if first.tensor else None,
        "places": group.count if group.count > 1 else None,
        "file": first.file if len(files) == 1 else None,
        "message": shown_message(group),
        "remedy": first.remedy or None,
    }


def _layer_rows(report: Report, pictures: Mapping[str, LayerPictures]) -> list[Row]:
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
        {
            "layer": layer.prefix,
            "format": layer.format and format_label(layer.format),
            "bits": layer.bits,
            "group size": layer.group_size,
            "symmetric": _yes_or_no(layer.sym),
            "act order": _yes_or_no(layer.act_order),
            **_two_sizes(layer.shape),
            "dtype": layer.dtype,
            "scales": layer.scale_dtype,
            "sizes of scales": pictures.get(layer.prefix, no_pictures).scales or None,
            "error": pictures.get(layer.prefix, no_pictures).error or None,
            "bytes": layer.bytes,
            "findings": counts.get(layer.prefix, 0),
        }
        for layer in report.layers
    ]


def _two_sizes(shape: Sequence[int]) -> Row:
    return {"N": shape[0] if shape else None, "K": shape[1] if len(shape) > 1 else None}


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
        tables=[ReportTable("Layers", rows, numbers=("N", "K"))],
        notes=explanation.notes,
        drawings=draw_formats(formats),
    ).html()


def _explained_row(layer: ExplainedLayer, counts: Sequence[int]) -> Row:
    kernels = {choice.tokens: f"{choice.kernel}, {choice.time}" for choice in layer.choices}
    refused = [*layer.formats.items(), *(item for choice in layer.choices for item in choice.refused.items())]
    reasons = dict.fromkeys(f"{name}: {reason}" for name, reason in refused)
    return {
        "layer": layer.prefix,
        "format": layer.format and format_label(layer.format),
        **_two_sizes(layer.shape),
        "kernel format": layer.kernel_format,
        **{"1 token" if count == 1 else f"{count} tokens": kernels.get(count) for count in counts},
        "reasons against others": "\n".join(reasons) or None,
        "changes for others": "\n".join(layer.changes) or None,
        "error": layer.error or None,
    }
