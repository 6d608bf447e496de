"""Text of reports: escaped names, sizes and counts, and the summary on standard error."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qload.checkpoint import Coverage
    from qload.checkpoint.report_base import LayerReportBase
    from qload.plan import ExplainedLayer, Explanation, ShardingPlan, WorldPlan
    from qload.verify import Finding, Report

MAX_NAME_CHARACTERS = 300
MAX_TEXT_CHARACTERS = 4000
MAX_MESSAGE_CHARACTERS = 300
MAX_SUMMARY_LINES = 10


def escape(text: object, *, keep: str = "", limit: int = MAX_TEXT_CHARACTERS) -> str:
    """Escape unprintable characters as Python does, and cut a long text with a note of its length.

    Unprintable are control characters, escape sequences, lone surrogates and changes of text direction.
    `keep`: characters to leave as they are. `limit`: characters of the result.
    """
    printed = str(text)
    if len(printed) > limit:
        printed = f"{printed[:limit]}... ({len(printed)} characters)"
    if printed.isprintable():
        return printed
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in printed)


def escape_name(text: str) -> str:
    """Escape the name of a tensor or a file into one line."""
    return escape(text, limit=MAX_NAME_CHARACTERS)


def format_size(count: int) -> str:
    """Format bytes in binary units: 1536 -> '1.5 KiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def format_percent(part: int, whole: int) -> str:
    """Format a share: (1, 3) -> '33.3 %'; only an empty share is '0 %', and only the whole is '100 %'."""
    if part in (0, whole):
        return "100 %" if part == whole else "0 %"
    tenths = min(max(part * 1000 // whole, 1), 999)
    return f"{tenths / 10:g} %"


def format_count(count: int, noun: str) -> str:
    """Format a count with its noun: '1 layer', '2 layers'."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_summary(lines: Iterable[str], as_json: bool | None) -> None:
    """Print at most ten lines on standard error if standard output is JSON in a pipe or a file."""
    if as_json is False or sys.stdout.isatty():
        return
    printed = list(lines)
    if len(printed) > MAX_SUMMARY_LINES:
        printed[MAX_SUMMARY_LINES - 1 :] = [f"... and {len(printed) - MAX_SUMMARY_LINES + 1} more lines"]
    for line in printed:
        click.echo(line, err=True)


def report_lines(report: "Report") -> Iterator[str]:
    """Summarize a report: its verdict, a line per cause of findings, and its notes."""
    yield verdict_line(report)
    yield from finding_lines(report.findings)
    yield from note_lines(report.notes)


def verdict_lines(reports: "Sequence[Report]") -> Iterator[str]:
    """Summarize several reports: a verdict per checkpoint, findings first."""
    return map(verdict_line, sorted(reports, key=lambda report: report.verdict == "ok"))


def verdict_line(report: "Report") -> str:
    """Format a verdict: ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    counts = _finding_counts(report.findings)
    counts += [format_count(len(report.notes), "note")] if report.notes else []
    parts = [", ".join(counts)] if counts else []
    parts += [_coverage_text(report.coverage)] if report.coverage else []
    return f"{report.verdict}  {escape(report.path)}: {'; '.join(parts) or 'nothing found'}"


def _finding_counts(findings: "Sequence[Finding]") -> list[str]:
    """Count findings by severity: '1 error in 14 places', '2 warnings'."""
    from qload.verify.report import group_findings

    groups = group_findings(findings)
    counts = []
    for severity in ("error", "warning"):
        causes = [group for group in groups if group.first.severity == severity]
        places = sum(max(1, group.count) for group in causes)
        if causes:
            suffix = f" in {places} places" if places > len(causes) else ""
            counts.append(format_count(len(causes), severity) + suffix)
    return counts


def finding_lines(findings: "Iterable[Finding]") -> Iterator[str]:
    """Format a line per cause: its first place, its message, and the number of places."""
    from qload.verify.report import group_findings

    for group in group_findings(findings):
        first = group.first
        place = first.tensor or first.file
        title = "  ".join([first.severity, escape(first.rule), *([escape_name(place)] if place else [])])
        yield f"{title}: {_join_lines(first.detail)}{_count_suffix(group.count)}"


def layer_lines(outcomes: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Format a line per outcome and reason, from tuples (outcome, layer name, reason)."""
    from qload.errors.reporting import cause_of, group_by_cause

    groups = group_by_cause(
        outcomes, name=lambda each: each[1], cause=lambda each: (each[0], cause_of(each[2], each[1]))
    )
    for group in groups:
        outcome, layer, reason = group.first
        detail = f": {_join_lines(reason.removeprefix(f'{layer}: '))}" if reason else ""
        yield f"{outcome}  {escape_name(layer)}{detail}{_count_suffix(group.count)}"


def outcome_counts(report: "LayerReportBase", outcomes: Mapping[str, str]) -> str:
    """Count the layers of each outcome, or give the reason why the checkpoint cannot be read."""
    reason = getattr(report, "unreadable", "") or getattr(report, "unsupported", "")
    numbers = [f"{count} {outcomes[outcome]}" for outcome, count in sorted(report.counts.items())]
    return _join_lines(reason, MAX_TEXT_CHARACTERS) or ", ".join(numbers) or "nothing found"


def refusal_line(report: "ShardingPlan | Explanation") -> str:
    """Format the verdict on an unreadable or unsupported checkpoint; "" for any other."""
    reason = report.unreadable or report.unsupported
    text = _join_lines(reason.removeprefix(f"{report.path}: "), MAX_TEXT_CHARACTERS)
    return f"{report.verdict}  {escape(report.path)}: {text}" if reason else ""


def plan_lines(plan: "ShardingPlan") -> Iterator[str]:
    """Summarize a plan: its verdict, a line per number of ranks, and the layers that cannot be sharded."""
    if refusal := refusal_line(plan):
        yield refusal
        return
    yield f"{plan.verdict}  {escape(plan.path)}: {format_count(len(plan.layers), 'layer')}"
    yield from starmap(world_line, plan.worlds.items())
    for ranks in plan.worlds:
        shares = ((layer, layer.shares[ranks]) for layer in plan.layers)
        yield from layer_lines(
            (format_count(ranks, "rank"), layer.prefix, share.reason)
            for layer, share in shares
            if not share.fits
        )
    yield from note_lines(plan.notes)


def world_line(ranks: int, world: "WorldPlan") -> str:
    """Format the bytes per rank: ok  4 ranks: 1.2 GiB to 1.3 GiB each."""
    largest, smallest = max(world.bytes), min(world.bytes)
    sizes = format_size(largest)
    if largest != smallest:
        sizes = f"{format_size(smallest)} to {sizes}"
    each = " each" if ranks > 1 else ""
    result = f"{sizes}{each}" if world.fits else f"{format_count(world.refused, 'layer')} cannot be shared"
    return f"{'ok' if world.fits else 'no'}  {format_count(ranks, 'rank')}: {result}"


def explanation_lines(explanation: "Explanation") -> Iterator[str]:
    """Summarize an explanation: its verdict, layers with errors, and a line per set of kernels."""
    if refusal := refusal_line(explanation):
        yield refusal
        return
    yield explanation_line(explanation)
    layers = explanation.layers
    yield from layer_lines(("error", layer.prefix, layer.error) for layer in layers if layer.error)
    yield from layer_lines((_kernels_text(layer), layer.prefix, "") for layer in layers if not layer.error)
    yield from note_lines(explanation.notes)


def explanation_line(explanation: "Explanation") -> str:
    """Format the verdict: ok  ./model on sm90, activations of float16."""
    ranks = f"rank 0 of {explanation.tp}, " if explanation.tp > 1 else ""
    place = f"{escape(explanation.path)} on {explanation.arch}"
    return f"{explanation.verdict}  {place}, {ranks}activations of {explanation.dtype}"


def _kernels_text(layer: "ExplainedLayer") -> str:
    """Format the kernels of a layer: 'strips: decode (1), many (64, 1024 tokens)'."""
    kernels: dict[str, list[str]] = {}
    for choice in layer.choices:
        kernels.setdefault(choice.kernel, []).append(str(choice.tokens))
    choices = ", ".join(f"{kernel} ({', '.join(tokens)} tokens)" for kernel, tokens in kernels.items())
    return f"{escape(layer.kernel_format)}: {choices}"


def note_lines(notes: Iterable[str]) -> Iterator[str]:
    """Format a line per note; notes that differ only in names and numbers share a line."""
    from qload.errors.reporting import group_texts

    return (f"note  {_join_lines(note)}" for note in group_texts(notes))


def _join_lines(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return escape("; ".join(filter(None, lines)), limit=limit)


def _count_suffix(count: int) -> str:
    return f" ({count} in all)" if count > 1 else ""


def _coverage_text(coverage: "Coverage") -> str:
    """Format the number of layers and plain tensors, and the share of bytes that they explain."""
    counts = ((coverage.layers, "layer"), (coverage.plain_tensors, "plain tensor"))
    parts = [format_count(count, noun) for count, noun in counts if count]
    share = format_percent(coverage.explained, coverage.total)
    parts.append(f"{share} of {format_size(coverage.total)} explained")
    if coverage.unread:
        parts.append(f"{format_percent(coverage.unread, coverage.total)} not read")
    return ", ".join(parts)
