"""A plan as tables: each layer, what of it does not fit and what can be done, each number of ranks."""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from qload.cli.console import Paragraph, glued
from qload.cli.summary import world_line
from qload.cli.tables import STYLE, NamedRow, NameTable, notes
from qload.cli.text import name, plural, safe, size
from qload.errors.causes import Fold, fold, group_by_cause, unfolded
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
        yield from _refused(plan.layers, ranks, every=every)
    for ranks, world in plan.worlds.items():
        yield _world(ranks, world)
    if plan.lawful is not None:
        yield Text("lawful  ", "green").append(safe(plan.lawful.text()), "none")
    yield from notes(plan.notes)


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


def _refused(layers: "Sequence[PlannedLayer]", ranks: int, *, every: bool) -> Iterator[RenderableType]:
    """Layers that do not fit so many ranks, those of one reason as one, and what can be done instead.

    `every`: each layer by itself.
    """
    groups = group_by_cause(
        (layer for layer in layers if not layer.shares[ranks].fits),
        name=_prefix,
        cause=lambda layer: layer.prefix if every else _reason(layer, ranks),
    )
    for group in groups:
        first = group.first.shares[ranks]
        title = Text(f"{plural(ranks, 'rank')}  ", "bold red")
        places = [glued(name(place)) for place in group.places()]
        count = f"  x{group.count}" if group.count > 1 else ""
        yield title.append(("\n" + " " * len(title.plain)).join(places), "none").append(count)
        yield Paragraph(Text(safe(first.reason, keep="\n")), 4)
        for each in first.alternatives:
            yield Paragraph(Text("instead  ", "green").append(_instead(each), "none"), 4)


def _reason(layer: "PlannedLayer", ranks: int) -> Hashable:
    """Why a layer does not fit, without its name, and what can be done instead."""
    share = layer.shares[ranks]
    return share.alternatives, share.reason.replace(layer.prefix, "")


def _instead(each: "Alternative") -> str:
    return f"{each.kind}: {safe(each.text)}; {size(max(each.bytes, 0))} more on the fullest rank"


def _world(ranks: int, world: "WorldPlan") -> Text:
    verdict = "ok" if world.fits else "no"
    rest = world_line(ranks, world).removeprefix(verdict)
    return Text(verdict, STYLE["ok"] if world.fits else "bold red").append(rest, "none")
