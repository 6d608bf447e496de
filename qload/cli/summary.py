"""A report in at most ten lines, on standard error, where standard output is JSON for a program.

A line is not wrapped, has no escape sequence, and has no name cut short.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import TYPE_CHECKING

import click

from qload.cli.text import name, percent, plural, safe, size

if TYPE_CHECKING:
    from qload.listing import Coverage
    from qload.listing.report_base import AnswerByLayer
    from qload.plan import ExplainedLayer, Explanation, ShardingPlan, WorldPlan
    from qload.verify import Finding, Report

LINES = 10
MESSAGE_LIMIT = 300  # characters of a message


def summarize(lines: Iterable[str], as_json: bool | None) -> None:
    """Print the first lines on standard error if standard output is JSON that no terminal shows."""
    if as_json is False or sys.stdout.isatty():
        return
    listed = list(lines)
    if len(listed) > LINES:
        listed[LINES - 1 :] = [f"... and {len(listed) - LINES + 1} more lines"]
    for line in listed:
        click.echo(line, err=True)


def report_lines(report: "Report") -> Iterator[str]:
    """The verdict, a line for each cause of findings, and the notes."""
    yield verdict_line(report)
    yield from finding_lines(report.findings)
    yield from note_lines(report.notes)


def several_lines(reports: "Sequence[Report]") -> Iterator[str]:
    """The verdict of each checkpoint, those with findings first."""
    return map(verdict_line, sorted(reports, key=lambda report: report.verdict == "ok"))


def verdict_line(report: "Report") -> str:
    """ok  ./model: 21 layers, 7 plain tensors, 100 % of 1.1 MiB explained."""
    found = _counted(report.findings)
    found += [plural(len(report.notes), "note")] if report.notes else []
    parts = [", ".join(found)] if found else []
    parts += [_coverage(report.coverage)] if report.coverage else []
    return f"{report.verdict}  {safe(report.path)}: {'; '.join(parts) or 'nothing found'}"


def _counted(findings: "Sequence[Finding]") -> list[str]:
    """1 error in 14 places, 2 warnings."""
    from qload.verify.report import group_findings

    groups = group_findings(findings)
    counted = []
    for severity in ("error", "warning"):
        alike = [group for group in groups if group.first.severity == severity]
        places = sum(max(1, group.count) for group in alike)
        if alike:
            beyond = f" in {places} places" if places > len(alike) else ""
            counted.append(plural(len(alike), severity) + beyond)
    return counted


def finding_lines(findings: "Iterable[Finding]") -> Iterator[str]:
    """A line for each cause, with the first of its places and how many there are."""
    from qload.verify.report import group_findings

    for group in group_findings(findings):
        first = group.first
        places = [name(place) for place in (first.tensor or first.file,) if place]
        lead = "  ".join([first.severity, safe(first.rule), *places])
        yield f"{lead}: {_in_one_line(first.detail)}{_more(group.count)}"


def layer_lines(outcomes: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """A line for each outcome and reason, from (outcome, name of a layer, reason)."""
    from qload.errors.causes import cause_of, group_by_cause

    groups = group_by_cause(
        outcomes, name=lambda each: each[1], cause=lambda each: (each[0], cause_of(each[2], each[1]))
    )
    for group in groups:
        outcome, layer, reason = group.first
        detail = f": {_in_one_line(reason.removeprefix(f'{layer}: '))}" if reason else ""
        yield f"{outcome}  {name(layer)}{detail}{_more(group.count)}"


def counts(found: "AnswerByLayer", outcomes: Mapping[str, str]) -> str:
    """How many layers have each outcome, in words; or why the checkpoint cannot be read."""
    why = getattr(found, "unreadable", "") or getattr(found, "unsupported", "")
    numbers = [f"{count} {outcomes[outcome]}" for outcome, count in sorted(found.counts.items())]
    return safe(why or ", ".join(numbers) or "nothing found")


def plan_lines(found: "ShardingPlan") -> Iterator[str]:
    """The verdict, a line for each number of ranks, and why layers cannot be shared."""
    if found.unreadable or found.unsupported:
        yield f"{found.verdict}  {safe(found.path)}: {safe(found.unreadable or found.unsupported)}"
        return
    yield f"{found.verdict}  {safe(found.path)}: {plural(len(found.layers), 'layer')}"
    yield from starmap(world_line, found.worlds.items())
    for ranks in found.worlds:
        refused = ((layer, layer.shares[ranks]) for layer in found.layers)
        yield from layer_lines(
            (plural(ranks, "rank"), layer.prefix, share.reason) for layer, share in refused if not share.fits
        )
    yield from note_lines(found.notes)


def world_line(ranks: int, world: "WorldPlan") -> str:
    """ok  4 ranks: 1.2 GiB each, at most 1.3 GiB."""
    most, least = max(world.bytes), min(world.bytes)
    held = size(most) if most == least else f"{size(least)} to {size(most)}"
    each = " each" if ranks > 1 else ""
    what = f"{held}{each}" if world.fits else f"{plural(world.refused, 'layer')} cannot be shared"
    return f"{'ok' if world.fits else 'no'}  {plural(ranks, 'rank')}: {what}"


def explanation_lines(found: "Explanation") -> Iterator[str]:
    """The verdict, and a line for each way in which layers are multiplied, or are not."""
    if found.unreadable or found.unsupported:
        yield f"{found.verdict}  {safe(found.path)}: {safe(found.unreadable or found.unsupported)}"
        return
    yield explanation_line(found)
    yield from layer_lines(("error", layer.prefix, layer.error) for layer in found.layers if layer.error)
    yield from layer_lines(
        (_multiplied(layer), layer.prefix, "") for layer in found.layers if not layer.error
    )
    yield from note_lines(found.notes)


def explanation_line(found: "Explanation") -> str:
    """ok  ./model on sm90, activations of float16."""
    ranks = f"rank 0 of {found.tp}, " if found.tp > 1 else ""
    return f"{found.verdict}  {safe(found.path)} on {found.arch}, {ranks}activations of {found.dtype}"


def _multiplied(layer: "ExplainedLayer") -> str:
    """`strips: decode (1), many (64, 1024 tokens)`: the kernels of one kernel format."""
    kernels: dict[str, list[str]] = {}
    for choice in layer.choices:
        kernels.setdefault(choice.kernel, []).append(str(choice.tokens))
    told = ", ".join(f"{kernel} ({', '.join(tokens)} tokens)" for kernel, tokens in kernels.items())
    return f"{safe(layer.kernel_format)}: {told}"


def note_lines(notes: Iterable[str]) -> Iterator[str]:
    """A line for each note, those that differ in names and numbers alone as one."""
    from qload.errors.causes import group_texts

    return (f"note  {_in_one_line(note)}" for note in group_texts(notes))


def _in_one_line(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return safe("; ".join(filter(None, lines)), limit=MESSAGE_LIMIT)


def _more(count: int) -> str:
    return f" ({count} in all)" if count > 1 else ""


def _coverage(coverage: "Coverage") -> str:
    """What was explained, and which share of the bytes; never 100 % of what was not."""
    counts = ((coverage.layers, "layer"), (coverage.plain_tensors, "plain tensor"))
    parts = [plural(count, what) for count, what in counts if count]
    parts.append(f"{percent(coverage.explained, coverage.total)} of {size(coverage.total)} explained")
    if coverage.unread:
        parts.append(f"{percent(coverage.unread, coverage.total)} not read")
    return ", ".join(parts)
