"""Reports as one page of HTML: tables that a script sorts and filters, and no external file."""

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

from qload.errors import ArgumentError
from qload.errors.reporting import CauseGroup, group_texts
from qload.listing import format_label
from qload.pictures.drawing import draw_formats
from qload.pictures.histograms import LayerPictures
from qload.plan import ExplainedLayer, Explanation, KernelChoice
from qload.verify import Report
from qload.verify.report import Finding, group_findings, shown_message
from qload.verify.rule_pages import rule_pages

FENCE = "```"
INLINE = re.compile(r"`([^`]+)`|(?<!\w)\*\*(?=\S)(.+?)(?<=\S)\*\*(?!\w)|\[([^\]]+)\]\(([^()\s]+)\)")
RULE_LINK = re.compile(r"([a-z0-9-]+)\.md")
TABLE_LINE = re.compile(r"[|\s:-]+")  # under the titles of a table


def markdown_html(text: str, rules: Sequence[str] = ()) -> str:
    """The text as HTML; a link to the page of one of `rules` leads to its explanation on this page.

    Other links are their text alone: a page of HTML needs nothing beside it.
    """
    return "\n".join(_block_elements(text.split("\n"), lambda line: _inline_markup(line, rules)))


def _block_elements(lines: Sequence[str], inline: Callable[[str], str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith(FENCE):
            while end < len(lines) and not lines[end].startswith(FENCE):
                end += 1
            yield f"<pre><code>{escape(chr(10).join(lines[at + 1 : end]))}</code></pre>"
            end += 1
        elif line.startswith("- "):
            while end < len(lines) and lines[end].startswith("- "):
                end += 1
            items = (f"<li>{inline(item[2:])}</li>" for item in lines[at:end])
            yield f"<ul>{''.join(items)}</ul>"
        elif line.startswith("|"):
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            yield _table_element(lines[at:end], inline)
        elif line.strip():
            while end < len(lines) and lines[end].strip() and not lines[end].startswith(("- ", "|", FENCE)):
                end += 1
            yield f"<p>{inline(' '.join(lines[at:end]))}</p>"
        at = end


def _table_element(lines: Sequence[str], inline: Callable[[str], str]) -> str:
    rows = [
        [inline(cell.strip()) for cell in line.strip().strip("|").split("|")]
        for line in lines
        if not TABLE_LINE.fullmatch(line)
    ]
    head, *body = (f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"


def _inline_markup(text: str, rules: Sequence[str]) -> str:
    parts, done = [], 0
    for found in INLINE.finditer(text):
        parts.append(escape(text[done : found.start()]))
        code, bold, title, target = found.groups()
        if code is not None:
            parts.append(f"<code>{escape(code)}</code>")
        elif bold is not None:
            parts.append(f"<strong>{_inline_markup(bold, rules)}</strong>")
        else:
            rule = RULE_LINK.fullmatch(target)
            known = rule is not None and rule[1] in rules
            parts.append(f'<a href="#{rule[1]}">{escape(title)}</a>' if rule and known else escape(title))
        done = found.end()
    return "".join([*parts, escape(text[done:])])


MAX_TEXT_CHARACTERS = 4000  # characters of a text


@dataclass(frozen=True)
class ReportTable:
    """Rows that are sorted and filtered in the browser.

    `columns`: their titles; `numbers`: which of them are sorted as numbers; `links`: the one whose text is
    also the `id` of an explanation on the page, or "". `rows`: a value for each column, None: there is none.
    `drawn`: columns whose texts are drawn, as "bars" or as a "map", see `qload.pictures.histograms`.
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
            _read_template("page.html.jinja")
        )
        return template.render(
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
    """Text that is printed as it is read: controls, and what turns direction, as Python writes them."""
    told = str(text)
    told = (
        told
        if len(told) <= MAX_TEXT_CHARACTERS
        else f"{told[:MAX_TEXT_CHARACTERS]}... ({len(told)} characters)"
    )
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in told)


def _tables_json(tables: Sequence[ReportTable]) -> str:
    """As JSON within a script element, which ends at no text of it."""
    found: list[dict[str, Any]] = [
        {
            "columns": list(table.columns),
            "numbers": [table.columns.index(name) for name in table.numbers],
            "drawn": {table.columns.index(name): how for name, how in table.drawn.items()},
            "link": table.columns.index(table.links) if table.links else -1,
            "rows": [
                [escape_controls(cell) if isinstance(cell, str) else cell for cell in row]
                for row in table.rows
            ],
        }
        for table in tables
    ]
    text = json.dumps(found, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _csp_hash(text: str) -> str:
    """Of an element's text, by which the policy of a page allows it. Source: W3C, CSP Level 3."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _read_template(name: str) -> str:
    return resources.files("qload.pictures").joinpath("template", name).read_text("utf-8")


FINDING_COLUMNS = ("rule", "severity", "tensor", "places", "file", "message", "remedy")
LAYER_COLUMNS = (
    "layer", "format", "bits", "group size", "symmetric", "act order", "N", "K", "dtype", "scales",
    "sizes of scales", "error", "bytes", "findings",
)  # fmt: skip
DRAWN_COLUMNS = {"sizes of scales": "bars", "error": "map"}
NO_PICTURES = LayerPictures()
NUMBER_COLUMNS = ("bits", "group size", "N", "K", "bytes", "findings")


def report_page(report: Report, pictures: Mapping[str, LayerPictures] | None = None) -> str:
    """One page of HTML that needs nothing beside it; each finding is linked to what its rule says there.

    `pictures`: of layers by name, as `layer_pictures` makes them.
    """
    found = {finding.rule for finding in report.findings}
    groups = group_findings(report.findings)
    facts = {
        "checkpoint": report.path,
        "findings": str(len(groups)),
        "layers": str(len(report.layers)),
    }
    facts |= {str(name): str(value) for name, value in report.claims.items()}
    return Page(
        title="qload verify",
        verdict=report.verdict,
        facts=facts,
        tables=[
            ReportTable(
                "Findings",
                FINDING_COLUMNS,
                list(map(_finding_row, groups)),
                numbers=("places",),
                links="rule",
            ),
            ReportTable(
                "Layers",
                LAYER_COLUMNS,
                _layer_rows(report, pictures or {}),
                numbers=NUMBER_COLUMNS,
                drawn=DRAWN_COLUMNS,
            ),
        ],
        notes=group_texts(report.notes),
        shares=_coverage_shares(report),
        explanations={rule: _rule_markdown(page) for rule, page in rule_pages().items() if rule in found},
        drawings=draw_formats((layer.format, layer.bits) for layer in report.layers),
    ).html()


def _finding_row(group: CauseGroup[Finding]) -> list[str | int | None]:
    """A row for findings of one cause; its tensors in short, the file if all are in one."""
    first, files = group.first, {finding.file for finding in group.items}
    tensors = "\n".join(group.places(None)) if first.tensor else None
    file = first.file if len(files) == 1 else None
    count = group.count if group.count > 1 else None
    return [first.rule, first.severity, tensors, count, file, shown_message(group), first.remedy or None]


def _layer_rows(report: Report, pictures: Mapping[str, LayerPictures]) -> list[Sequence[str | int | None]]:
    """A row for each layer; findings count where they name a tensor of it."""
    counts: dict[str, int] = {}
    known = {layer.prefix for layer in report.layers}
    for finding in report.findings:
        prefix = finding.tensor or ""
        while prefix and prefix not in known:
            prefix = prefix.rpartition(".")[0]
        counts[prefix] = counts.get(prefix, 0) + 1
    return [
        [
            layer.prefix,
            layer.format and format_label(layer.format),
            layer.bits,
            layer.group_size,
            _yes_or_no(layer.sym),
            _yes_or_no(layer.act_order),
            layer.shape[0] if layer.shape else None,
            layer.shape[1] if len(layer.shape) > 1 else None,
            layer.dtype,
            layer.scale_dtype,
            pictures.get(layer.prefix, NO_PICTURES).scales or None,
            pictures.get(layer.prefix, NO_PICTURES).error or None,
            layer.bytes,
            counts.get(layer.prefix, 0),
        ]
        for layer in report.layers
    ]


def _yes_or_no(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _coverage_shares(report: Report) -> Mapping[str, int]:
    """Of all bytes, what is explained and what is not."""
    found = report.coverage
    if found is None:
        return {}
    return {
        "read": found.read,
        "exempt, for a reason": sum(found.exempt.values()),
        "not read by any format yet": found.unread,
        "of layers that are refused": found.refused,
        "unexplained": found.unexplained,
    }


def _rule_markdown(page: Mapping[str, str]) -> str:
    """The page of a rule in short, as Markdown."""
    return f"{page['what']}\n\n**Why it matters.** {page['why']}\n\n**What to do.** {page['do']}"


REASONS_COLUMN = "why not others"


def explanation_page(found: Explanation) -> str:
    """One page of HTML that needs nothing beside it."""
    tokens = list(dict.fromkeys(each.tokens for layer in found.layers for each in layer.choices))
    columns = [
        "layer",
        "format",
        "N",
        "K",
        "kernel format",
        *map(_tokens_title, tokens),
        REASONS_COLUMN,
        "what would",
        "error",
    ]
    facts = {
        "checkpoint": found.path,
        "chip": found.arch,
        "ranks": str(found.tp),
        "activations": found.dtype,
        "layers": str(len(found.layers)),
    }
    if found.unreadable or found.unsupported:
        facts[found.verdict] = found.unreadable or found.unsupported
    rows = [_explained_row(layer, tokens) for layer in found.layers]
    return Page(
        title="qload explain",
        verdict=found.verdict,
        facts=facts,
        tables=[ReportTable("Layers", columns, rows, numbers=("N", "K"))],
        notes=found.notes,
        drawings=draw_formats(_explained_layouts(found)),
    ).html()


def _explained_layouts(found: Explanation) -> Iterator[tuple[str | None, int | None]]:
    """The formats that layers are stored in and repacked to, with the bits of codes."""
    for layer in found.layers:
        yield layer.format, layer.bits
        yield layer.kernel_format, layer.bits


def _explained_row(layer: ExplainedLayer, tokens: Sequence[int]) -> list[str | int | None]:
    kernels = {choice.tokens: _kernel_text(choice) for choice in layer.choices}
    return [
        layer.prefix,
        layer.format and format_label(layer.format),
        layer.shape[0] if layer.shape else None,
        layer.shape[1] if len(layer.shape) > 1 else None,
        layer.kernel_format,
        *(kernels.get(count) for count in tokens),
        "\n".join(dict.fromkeys(_refusal_lines(layer))) or None,
        "\n".join(layer.changes) or None,
        layer.error or None,
    ]


def _kernel_text(choice: KernelChoice) -> str:
    """By name, with the prediction of its time, or that it was not measured."""
    return f"{choice.kernel}, {choice.time}"


def _refusal_lines(layer: ExplainedLayer) -> Iterator[str]:
    """Each reason once, although it holds for several numbers of tokens."""
    yield from (f"{name}: {why}" for name, why in layer.formats.items())
    for choice in layer.choices:
        yield from (f"{name}: {why}" for name, why in choice.refused.items())


def _tokens_title(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"
