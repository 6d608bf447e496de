"""A plan as tables: each layer, what of it does not fit and what can be done, each number of ranks."""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from qload.cli.fold import Fold, fold, unfolded
from qload.cli.tables import STYLE, table
from qload.cli.text import name, plural, safe, size

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


def _layers(rows: "Sequence[Fold[PlannedLayer]]", worlds: Sequence[int]) -> Table:
    """What each rank holds of each layer."""
    shown = table()
    shown.add_column("layer", overflow="fold")
    for column in ("count", "format", "(N, K)", "cut"):
        shown.add_column(column, justify="right" if column == "count" else "left")
    for ranks in worlds:
        shown.add_column(plural(ranks, "rank"), justify="right")
    for row in rows:
        layer, count = row.first, str(row.count) if row.count > 1 else ""
        facts = (safe(layer.format or "-"), safe(layer.shape), CUTS[layer.cut])
        shown.add_row(Text(name(row.name)), count, *facts, *(_held(layer.shares[each]) for each in worlds))
    return shown


def _held(share: "LayerShare") -> Text:
    """What the fullest rank holds, or that it does not fit."""
    return Text(size(max(share.bytes))) if share.fits else Text("no", "red")


def _refused(rows: "Sequence[Fold[PlannedLayer]]", ranks: int) -> Iterator[RenderableType]:
    """Each layer that does not fit so many ranks, why, and what can be done instead."""
    for row in rows:
        share = row.first.shares[ranks]
        if not share.fits:
            title = Text(f"{plural(ranks, 'rank')}  ", "bold red").append(name(row.name), "none")
            yield title.append(f"  x{row.count}" if row.count > 1 else "")
            yield Padding(Text(safe(share.reason, keep="\n")), (0, 0, 0, 4))
            for each in share.alternatives:
                yield Padding(Text("instead  ", "green").append(_instead(each), "none"), (0, 0, 0, 4))


def _instead(each: "Alternative") -> str:
    return f"{each.kind}: {safe(each.text)}; {size(max(each.bytes, 0))} more on the fullest rank"


def _world(ranks: int, world: "WorldPlan") -> Text:
    """ok  4 ranks: 1.2 GiB each, at most 1.3 GiB."""
    line = Text("ok" if world.fits else "no", STYLE["ok"] if world.fits else "bold red")
    most, least = max(world.bytes), min(world.bytes)
    held = size(most) if most == least else f"{size(least)} to {size(most)}"
    each = " each" if ranks > 1 else ""
    what = f"{held}{each}" if world.fits else f"{plural(world.refused, 'layer')} cannot be shared"
    return line.append(f"  {plural(ranks, 'rank')}: {what}", "none")
