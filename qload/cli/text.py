"""Text of reports: escaped names, sizes and counts, and the summary on standard error."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qload.listing import Coverage
    from qload.listing.report_base import LayerReportBase
    from qload.plan import ExplainedLayer, Explanation, ShardingPlan, WorldPlan
    from qload.verify import Finding, Report

MAX_NAME_CHARACTERS = 300
MAX_TEXT_CHARACTERS = 4000


def escape(text: object, *, keep: str = "", limit: int = MAX_TEXT_CHARACTERS) -> str:
    """What cannot be printed (escape sequences, controls, lone surrogates, text that turns direction) is
    shown as Python writes it; what is too long is cut, and says so."""
    shown = str(text)
    if len(shown) > limit:
        shown = f"{shown[:limit]}... ({len(shown)} characters)"
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in shown)


def escape_name(text: str) -> str:
    """A tensor's or a file's name: one line, whatever is in it."""
    return escape(text, limit=MAX_NAME_CHARACTERS)


def format_size(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def format_percent(part: int, whole: int) -> str:
    """(1, 3) -> '33.3 %'; 0 and 100 % are said of nothing and of all alone."""
    if part in (0, whole):
        return "100 %" if part == whole else "0 %"
    tenths = min(max(part * 1000 // whole, 1), 999)
    return f"{tenths / 10:g} %"


def format_count(count: int, noun: str) -> str:
    """1 layer, 2 layers."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


MAX_SUMMARY_LINES = 10
MAX_MESSAGE_CHARACTERS = 300  # characters of a message


def print_summary(lines: Iterable[str], as_json: bool | None) -> None:
    """Print the first lines on standard error if standard output is JSON that no terminal shows."""
    if as_json is False or sys.stdout.isatty():
        return
    listed = list(lines)
    if len(listed) > MAX_SUMMARY_LINES:
        listed[MAX_SUMMARY_LINES - 1 :] = [f"... and {len(listed) - MAX_SUMMARY_LINES + 1} more lines"]
    for line in listed:
        click.echo(line, err=True)


def report_lines(report: "Report") -> Iterator[str]:
    """The verdict, a line for each cause of findings, and the notes."""
    yield verdict_line(report)
    yield from finding_lines(report.findings)
    yield from note_lines(report.notes)


def verdict_lines(reports: "Sequence[Report]") -> Iterator[str]:
    """The verdict of each checkpoint, those with findings first."""
    return map(verdict_line, sorted(reports, key=lambda report: report.verdict == "ok"))


def verdict_line(report: "Report") -> str:
    """ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    found = _finding_counts(report.findings)
    found += [format_count(len(report.notes), "note")] if report.notes else []
    parts = [", ".join(found)] if found else []
    parts += [_coverage_text(report.coverage)] if report.coverage else []
    return f"{report.verdict}  {escape(report.path)}: {'; '.join(parts) or 'nothing found'}"


def _finding_counts(findings: "Sequence[Finding]") -> list[str]:
    """1 error in 14 places, 2 warnings."""
    from qload.verify.report import group_findings

    groups = group_findings(findings)
    counted = []
    for severity in ("error", "warning"):
        alike = [group for group in groups if group.first.severity == severity]
        places = sum(max(1, group.count) for group in alike)
        if alike:
            beyond = f" in {places} places" if places > len(alike) else ""
            counted.append(format_count(len(alike), severity) + beyond)
    return counted


def finding_lines(findings: "Iterable[Finding]") -> Iterator[str]:
    """A line for each cause, with the first of its places and how many there are."""
    from qload.verify.report import group_findings

    for group in group_findings(findings):
        first = group.first
        places = [escape_name(place) for place in (first.tensor or first.file,) if place]
        lead = "  ".join([first.severity, escape(first.rule), *places])
        yield f"{lead}: {_join_lines(first.detail)}{_count_suffix(group.count)}"


def layer_lines(outcomes: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A line for each outcome and reason, from (outcome, name of a layer, reason)."""
    from qload.errors.reporting import cause_of, group_by_cause

    groups = group_by_cause(
        outcomes, name=lambda each: each[1], cause=lambda each: (each[0], cause_of(each[2], each[1]))
    )
    for group in groups:
        outcome, layer, reason = group.first
        detail = f": {_join_lines(reason.removeprefix(f'{layer}: '))}" if reason else ""
        yield f"{outcome}  {escape_name(layer)}{detail}{_count_suffix(group.count)}"


def outcome_counts(found: "LayerReportBase", outcomes: Mapping[str, str]) -> str:
    """How many layers have each outcome, in words; or why the checkpoint cannot be read."""
    why = getattr(found, "unreadable", "") or getattr(found, "unsupported", "")
    numbers = [f"{count} {outcomes[outcome]}" for outcome, count in sorted(found.counts.items())]
    return escape(why or ", ".join(numbers) or "nothing found")


def plan_lines(found: "ShardingPlan") -> Iterator[str]:
    """The verdict, a line for each number of ranks, and why layers cannot be shared."""
    if found.unreadable or found.unsupported:
        yield f"{found.verdict}  {escape(found.path)}: {escape(found.unreadable or found.unsupported)}"
        return
    yield f"{found.verdict}  {escape(found.path)}: {format_count(len(found.layers), 'layer')}"
    yield from starmap(world_line, found.worlds.items())
    for ranks in found.worlds:
        refused = ((layer, layer.shares[ranks]) for layer in found.layers)
        yield from layer_lines(
            (format_count(ranks, "rank"), layer.prefix, share.reason)
            for layer, share in refused
            if not share.fits
        )
    yield from note_lines(found.notes)


def world_line(ranks: int, world: "WorldPlan") -> str:
    """ok  4 ranks: 1.2 GiB each, at most 1.3 GiB."""
    most, least = max(world.bytes), min(world.bytes)
    held = format_size(most) if most == least else f"{format_size(least)} to {format_size(most)}"
    each = " each" if ranks > 1 else ""
    what = f"{held}{each}" if world.fits else f"{format_count(world.refused, 'layer')} cannot be shared"
    return f"{'ok' if world.fits else 'no'}  {format_count(ranks, 'rank')}: {what}"


def explanation_lines(found: "Explanation") -> Iterator[str]:
    """The verdict, and a line for each way in which layers are multiplied, or are not."""
    if found.unreadable or found.unsupported:
        yield f"{found.verdict}  {escape(found.path)}: {escape(found.unreadable or found.unsupported)}"
        return
    yield explanation_line(found)
    yield from layer_lines(("error", layer.prefix, layer.error) for layer in found.layers if layer.error)
    yield from layer_lines(
        (_kernels_text(layer), layer.prefix, "") for layer in found.layers if not layer.error
    )
    yield from note_lines(found.notes)


def explanation_line(found: "Explanation") -> str:
    """ok  ./model on sm90, activations of float16."""
    ranks = f"rank 0 of {found.tp}, " if found.tp > 1 else ""
    return f"{found.verdict}  {escape(found.path)} on {found.arch}, {ranks}activations of {found.dtype}"


def _kernels_text(layer: "ExplainedLayer") -> str:
    """`strips: decode (1), many (64, 1024 tokens)`: the kernels of one kernel format."""
    kernels: dict[str, list[str]] = {}
    for choice in layer.choices:
        kernels.setdefault(choice.kernel, []).append(str(choice.tokens))
    told = ", ".join(f"{kernel} ({', '.join(tokens)} tokens)" for kernel, tokens in kernels.items())
    return f"{escape(layer.kernel_format)}: {told}"


def note_lines(notes: Iterable[str]) -> Iterator[str]:
    """A line for each note, those that differ in names and numbers alone as one."""
    from qload.errors.reporting import group_texts

    return (f"note  {_join_lines(note)}" for note in group_texts(notes))


def _join_lines(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return escape("; ".join(filter(None, lines)), limit=MAX_MESSAGE_CHARACTERS)


def _count_suffix(count: int) -> str:
    return f" ({count} in all)" if count > 1 else ""


def _coverage_text(coverage: "Coverage") -> str:
    """What was explained, and which share of the bytes; never 100 % of what was not."""
    counts = ((coverage.layers, "layer"), (coverage.plain_tensors, "plain tensor"))
    parts = [format_count(count, what) for count, what in counts if count]
    parts.append(
        f"{format_percent(coverage.explained, coverage.total)} of {format_size(coverage.total)} explained"
    )
    if coverage.unread:
        parts.append(f"{format_percent(coverage.unread, coverage.total)} not read")
    return ", ".join(parts)
