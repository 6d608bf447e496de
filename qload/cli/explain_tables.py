"""An explanation as a list: each kind of layers, its kernels, and under them the reasons against others."""

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from qload.cli.console import Paragraph, glued
from qload.cli.summary import explanation_line
from qload.cli.tables import STYLE
from qload.cli.text import name, plural, safe
from qload.errors.causes import Fold, fold, unfolded
from qload.listing import format_label

if TYPE_CHECKING:
    from qload.plan import ExplainedLayer, Explanation


def tables(found: "Explanation", *, every: bool) -> Iterator[RenderableType]:
    """The whole explanation; `every`: each layer, also where several are alike."""
    if found.unreadable or found.unsupported:
        why = safe(found.unreadable or found.unsupported)
        yield Text(found.verdict, "bold red").append(f"  {safe(found.path)}: {why}", "none")
        return
    rows = unfolded(found.layers, name=_prefix) if every else fold(found.layers, name=_prefix, alike=_kind)
    for row in rows:
        yield from _layer(row)
    rest = explanation_line(found).removeprefix(found.verdict)
    yield Text(found.verdict, STYLE.get(found.verdict, "bold red")).append(rest, "none")
    for note in found.notes:
        yield Text("note  ", "dim").append(safe(note), "none")


def _prefix(layer: "ExplainedLayer") -> str:
    return layer.prefix


def _kind(layer: "ExplainedLayer") -> Hashable:
    """What layers of one entry have in common."""
    bare = replace(layer, prefix="", error=layer.error.replace(layer.prefix, ""))
    return repr(bare)


def _layer(row: "Fold[ExplainedLayer]") -> Iterator[RenderableType]:
    layer = row.first
    title = Text(glued(name(row.name)), "bold").append(f"  x{row.count}" if row.count > 1 else "", "none")
    stored = "-" if layer.format is None else format_label(layer.format)
    made = "" if layer.kernel_format in (None, layer.format) else f" -> {layer.kernel_format}"
    yield title.append(f"  {safe(stored)}{made} {glued(safe(layer.shape))}", "none")
    if layer.error:
        yield Paragraph(Text(safe(layer.error, keep="\n"), "red"), 4)
    for other, why in layer.formats.items():
        yield Paragraph(Text(f"not {other}: {safe(why)}", "dim"), 4)
    for choice in layer.choices:
        tokens = plural(choice.tokens, "token")
        yield Paragraph(Text(f"{tokens}: ").append(choice.kernel, "green").append(f", {choice.time}"), 4)
        for other, why in choice.refused.items():
            yield Paragraph(Text(f"not {other}: {safe(why)}", "dim"), 8)
    for change in layer.changes:
        yield Paragraph(Text(f"would be taken with {safe(change)}", "yellow"), 4)
