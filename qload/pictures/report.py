"""What `verify` found, as a page: the verdict, which bytes are explained, findings and layers."""

from collections.abc import Mapping, Sequence

from qload.errors.causes import CauseGroup, group_texts
from qload.listing import format_label
from qload.pictures.in_pages import drawings_of
from qload.pictures.page import Page, ReportTable
from qload.pictures.values import LayerPictures
from qload.verify import Report
from qload.verify.report import Finding, group_findings, shown_message
from qload.verify.rule_pages import rule_pages

FINDINGS = ("rule", "severity", "tensor", "places", "file", "message", "remedy")
LAYERS = (
    "layer", "format", "bits", "group size", "symmetric", "act order", "N", "K", "dtype", "scales",
    "sizes of scales", "error", "bytes", "findings",
)  # fmt: skip
DRAWN = {"sizes of scales": "bars", "error": "map"}
NOTHING = LayerPictures()
COUNTED = ("bits", "group size", "N", "K", "bytes", "findings")


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
            ReportTable("Findings", FINDINGS, list(map(_finding, groups)), numbers=("places",), links="rule"),
            ReportTable("Layers", LAYERS, _layers(report, pictures or {}), numbers=COUNTED, drawn=DRAWN),
        ],
        notes=group_texts(report.notes),
        shares=_shares(report),
        explanations={rule: _explanation(page) for rule, page in rule_pages().items() if rule in found},
        drawings=drawings_of((layer.format, layer.bits) for layer in report.layers),
    ).html()


def _finding(group: CauseGroup[Finding]) -> list[str | int | None]:
    """A row for findings of one cause; its tensors in short, the file if all are in one."""
    first, files = group.first, {finding.file for finding in group.items}
    tensors = "\n".join(group.places(None)) if first.tensor else None
    file = first.file if len(files) == 1 else None
    count = group.count if group.count > 1 else None
    return [first.rule, first.severity, tensors, count, file, shown_message(group), first.remedy or None]


def _layers(report: Report, pictures: Mapping[str, LayerPictures]) -> list[Sequence[str | int | None]]:
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
            _word(layer.sym),
            _word(layer.act_order),
            layer.shape[0] if layer.shape else None,
            layer.shape[1] if len(layer.shape) > 1 else None,
            layer.dtype,
            layer.scale_dtype,
            pictures.get(layer.prefix, NOTHING).scales or None,
            pictures.get(layer.prefix, NOTHING).error or None,
            layer.bytes,
            counts.get(layer.prefix, 0),
        ]
        for layer in report.layers
    ]


def _word(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"


def _shares(report: Report) -> Mapping[str, int]:
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


def _explanation(page: Mapping[str, str]) -> str:
    """The page of a rule in short, as Markdown."""
    return f"{page['what']}\n\n**Why it matters.** {page['why']}\n\n**What to do.** {page['do']}"
