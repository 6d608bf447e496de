"""A plan as tables: each layer, what of it does not fit and what can be done, each number of ranks."""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from qload.cli.console import Paragraph, glued
from qload.cli.fold import Fold, fold, unfolded
from qload.cli.plan import world_line
from qload.cli.tables import STYLE, NamedRow, NameTable
from qload.cli.text import name, plural, safe, size
from qload.listing import format_label

if TYPE_CHECKING:
    from qload.plan import Alternative, LayerShare, PlannedLayer, ShardingPlan, WorldPlan

CUTS = {"N": "outputs", "K": "inputs", "experts": "whole experts", "whole": "not cut"}


def tables(plan: "ShardingPlan", *, every: bool) -> Iterator[RenderableType]:
    """The whole plan; `every`: a line for each layer, also where several are alike."""
    if plan.unreadable or plan.unsupported:
        why = safe(plan.unreadable or plan.unsupported)
        yield Text(plan.verdict, "bold red").append(f"  {safe(plan.path)}: {why}", "none")
        return
    rows = unfolded(plan.layers, name=_prefix) if every else fold(plan.layers, name=_prefix, alike=_kind)
    yield _layers(rows, list(plan.worlds))
    for ranks in plan.worlds:
        yield from _refused(rows, ranks)
    for ranks, world in plan.worlds.items():
        yield _world(ranks, world)
    for note in plan.notes:
        yield Text("note  ", "dim").append(safe(note), "none")


def _prefix(layer: "PlannedLayer") -> str:
    return layer.prefix


def _kind(layer: "PlannedLayer") -> Hashable:
    """What layers of one line have in common: all but the names in their errors."""
    shares = (
        (share.bytes, share.alternatives, share.reason.replace(layer.prefix, ""))
        for share in layer.shares.values()
    )
    return layer.format, layer.shape, layer.cut, tuple(shares)


def _layers(rows: "Sequence[Fold[PlannedLayer]]", worlds: Sequence[int]) -> NameTable:
    """What each rank holds of each layer."""
    listed, numbers = [], [plural(ranks, "rank") for ranks in worlds]
    for row in rows:
        layer = row.first
        stored = "-" if layer.format is None else format_label(layer.format)
        facts = map(Text, (safe(stored), safe(layer.shape), CUTS[layer.cut]))
        held = (_held(layer.shares[each]) for each in worlds)
        listed.append(NamedRow(name(row.name), [*facts, *held], row.count))
    return NameTable("layer", ("format", "(N, K)", "cut", *numbers), listed, numbers)


def _held(share: "LayerShare") -> Text:
    """What the fullest rank holds, or that it does not fit."""
    return Text(size(max(share.bytes))) if share.fits else Text("no", "red")


def _refused(rows: "Sequence[Fold[PlannedLayer]]", ranks: int) -> Iterator[RenderableType]:
    """Each layer that does not fit so many ranks, why, and what can be done instead."""
    for row in rows:
        share = row.first.shares[ranks]
        if not share.fits:
            title = Text(f"{plural(ranks, 'rank')}  ", "bold red").append(glued(name(row.name)), "none")
            yield title.append(f"  x{row.count}" if row.count > 1 else "")
            yield Paragraph(Text(safe(share.reason, keep="\n")), 4)
            for each in share.alternatives:
                yield Paragraph(Text("instead  ", "green").append(_instead(each), "none"), 4)


def _instead(each: "Alternative") -> str:
    return f"{each.kind}: {safe(each.text)}; {size(max(each.bytes, 0))} more on the fullest rank"


def _world(ranks: int, world: "WorldPlan") -> Text:
    verdict = "ok" if world.fits else "no"
    rest = world_line(ranks, world).removeprefix(verdict)
    return Text(verdict, STYLE["ok"] if world.fits else "bold red").append(rest, "none")
