"""Tables of layers in reports: stored formats, tensor-parallel plans, and kernel choices."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from qload.cli.tables import VERDICT_STYLES, NamedRow, NameTable, Paragraph, join_words, note_texts
from qload.cli.text import escape, escape_name, explanation_line, format_count, format_size, world_line
from qload.errors.reporting import RowGroup, group_by_cause, group_rows, ungrouped_rows
from qload.listing import format_label

if TYPE_CHECKING:
    from qload.listing import LayerInfo
    from qload.plan import (
        Alternative,
        ExplainedLayer,
        Explanation,
        LayerShare,
        PlannedLayer,
        ShardingPlan,
        WorldPlan,
    )
    from qload.verify import Report

UNQUANTIZED = "unquantized"
KIND_FIELDS = (
    "format",
    "bits",
    "group_size",
    "sym",
    "act_order",
    "shape",
    "expected",
    "dtype",
    "scale_dtype",
    "bytes",
)
CLAIM_KEYS = {
    "format": "method",
    "bits": "bits",
    "group_size": "group_size",
    "sym": "sym",
    "act_order": "desc_act",
}
LAYER_COLUMNS = ("format", "bits", "group", "sym", "act order", "(N, K)", "dtype", "bytes")


def contents_tables(report: "Report", *, every: bool) -> Iterator[RenderableType]:
    """The layers, folded unless `every` one is asked for, and a line on the plain tensors among them."""
    plain = [layer for layer in report.layers if layer.format == UNQUANTIZED]
    listed = [layer for layer in report.layers if layer.format != UNQUANTIZED]
    if every or not listed:
        plain, listed = [], list(report.layers)
    if listed:
        rows = (
            ungrouped_rows(listed, name=_stored_prefix)
            if every
            else group_rows(listed, name=_stored_prefix, alike=_stored_kind)
        )
        yield NameTable(
            "layer",
            LAYER_COLUMNS,
            [*_config_rows(report.claims), *_layer_rows(rows, report.claims)],
            ("bytes",),
        )
    yield from _activation_lines(report.layers)
    if plain:
        yield Text(_plain_tensors_line(plain))
    if report.layers:
        total = sum(layer.bytes for layer in report.layers)
        yield Text(f"{format_count(len(report.layers), 'layer')} in all, {format_size(total)}")


def _layer_rows(rows: "Sequence[RowGroup[LayerInfo]]", claims: Mapping[str, Any]) -> Iterator[NamedRow]:
    for row in rows:
        yield NamedRow(escape_name(row.name), _layer_cells(row.first, claims), row.count)


def _config_rows(claims: Mapping[str, Any]) -> Iterator[NamedRow]:
    """The config's own row, if there is a config."""
    if not claims:
        return
    form = " ".join(dict.fromkeys(map(format_label, (claims["method"], claims["format"]))))
    facts = [_cell_text(claims[CLAIM_KEYS[fact]]) for fact in ("bits", "group_size", "sym", "act_order")]
    cells = [Text(cell) for cell in (escape(form), *facts, "", "", "")]
    yield NamedRow(f"{escape(claims['file'])} claims", cells, style="italic")


def _layer_cells(layer: "LayerInfo", claims: Mapping[str, Any]) -> list[Text]:
    """A layer's row."""
    own = layer.scale_dtype in (
        None,
        layer.dtype,
    )  # or the dtype is the weight's, and the scales have another
    dtype = layer.dtype if own else f"{layer.dtype}, scales {layer.scale_dtype}"
    rest = (escape(dtype), format_size(layer.bytes))
    return [*(_claim_cell(layer, fact, claims) for fact in CLAIM_KEYS), _shape_cell(layer), *map(Text, rest)]


def _shape_cell(layer: "LayerInfo") -> Text:
    """What the tensors say; where the model's config claims another, that too."""
    if layer.expected in (None, layer.shape):
        return Text(str(layer.shape))
    return Text(f"{layer.shape} (claimed {layer.expected})", "yellow")


def _claim_cell(layer: "LayerInfo", fact: str, claims: Mapping[str, Any]) -> Text:
    """What the tensors say, if they say it; where the config claims something else, that too."""
    value = getattr(layer, fact)
    key = CLAIM_KEYS[fact]
    own = getattr(layer.claims, key, claims.get(key))  # the entry of the config for this layer
    claim = None if layer.format == UNQUANTIZED else own
    if None in (claim, value) or claim == value:
        return Text(_cell_text(value))
    return Text(f"{_cell_text(value)} (claimed {_cell_text(claim)})", "yellow")


def _cell_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return escape(format_label(value) if isinstance(value, str) else value)


def _activation_lines(listed: Sequence["LayerInfo"]) -> Iterator[Text]:
    """A line for each way to quantize inputs that layers declare."""
    counts = Counter(str(layer.activations) for layer in listed if layer.activations is not None)
    for scheme, count in counts.most_common():
        yield Text(f"inputs quantized: {escape(scheme)}, of {format_count(count, 'layer')}")


def _plain_tensors_line(plain: Sequence["LayerInfo"]) -> str:
    dtypes = Counter(layer.dtype for layer in plain)
    kinds = ", ".join(f"{count} {escape(dtype)}" for dtype, count in dtypes.most_common())
    total = format_size(sum(layer.bytes for layer in plain))
    return f"and {format_count(len(plain), 'plain tensor')} ({kinds}; {total}), listed by --all"


def _stored_prefix(layer: "LayerInfo") -> str:
    return layer.prefix


def _stored_kind(layer: "LayerInfo") -> tuple[Any, ...]:
    return (*(getattr(layer, fact) for fact in KIND_FIELDS), str(layer.activations))


CUT_NAMES = {"N": "outputs", "K": "inputs", "experts": "whole experts", "whole": "not cut"}


def plan_tables(plan: "ShardingPlan", *, every: bool) -> Iterator[RenderableType]:
    """The whole plan; `every`: a line for each layer, also where several are alike."""
    if plan.unreadable or plan.unsupported:
        why = escape(plan.unreadable or plan.unsupported)
        yield Text(plan.verdict, "bold red").append(f"  {escape(plan.path)}: {why}", "none")
        return
    rows = (
        ungrouped_rows(plan.layers, name=_planned_prefix)
        if every
        else group_rows(plan.layers, name=_planned_prefix, alike=_planned_kind)
    )
    yield _share_table(rows, list(plan.worlds))
    for ranks in plan.worlds:
        yield from _refused_layers(plan.layers, ranks, every=every)
    for ranks, world in plan.worlds.items():
        yield _world_text(ranks, world)
    if plan.lawful is not None:
        yield Text("lawful  ", "green").append(escape(plan.lawful.text()), "none")
    yield from note_texts(plan.notes)


def _planned_prefix(layer: "PlannedLayer") -> str:
    return layer.prefix


def _planned_kind(layer: "PlannedLayer") -> Hashable:
    """What layers of one line have in common: all but the names in their errors."""
    shares = (
        (share.bytes, share.alternatives, share.reason.replace(layer.prefix, ""))
        for share in layer.shares.values()
    )
    return layer.format, layer.shape, layer.cut, tuple(shares)


def _share_table(rows: "Sequence[RowGroup[PlannedLayer]]", worlds: Sequence[int]) -> NameTable:
    """What each rank holds of each layer."""
    listed, numbers = [], [format_count(ranks, "rank") for ranks in worlds]
    for row in rows:
        layer = row.first
        stored = "-" if layer.format is None else format_label(layer.format)
        facts = map(Text, (escape(stored), escape(layer.shape), CUT_NAMES[layer.cut]))
        held = (_share_size(layer.shares[each]) for each in worlds)
        listed.append(NamedRow(escape_name(row.name), [*facts, *held], row.count))
    return NameTable("layer", ("format", "(N, K)", "cut", *numbers), listed, numbers)


def _share_size(share: "LayerShare") -> Text:
    """What the fullest rank holds, or that it does not fit."""
    return Text(format_size(max(share.bytes))) if share.fits else Text("no", "red")


def _refused_layers(layers: "Sequence[PlannedLayer]", ranks: int, *, every: bool) -> Iterator[RenderableType]:
    """Layers that do not fit so many ranks, those of one reason as one, and what can be done instead.

    `every`: each layer by itself.
    """
    groups = group_by_cause(
        (layer for layer in layers if not layer.shares[ranks].fits),
        name=_planned_prefix,
        cause=lambda layer: layer.prefix if every else _refusal_key(layer, ranks),
    )
    for group in groups:
        first = group.first.shares[ranks]
        title = Text(f"{format_count(ranks, 'rank')}  ", "bold red")
        places = [join_words(escape_name(place)) for place in group.places()]
        count = f"  x{group.count}" if group.count > 1 else ""
        yield title.append(("\n" + " " * len(title.plain)).join(places), "none").append(count)
        yield Paragraph(Text(escape(first.reason, keep="\n")), 4)
        for each in first.alternatives:
            yield Paragraph(Text("instead  ", "green").append(_alternative_text(each), "none"), 4)


def _refusal_key(layer: "PlannedLayer", ranks: int) -> Hashable:
    """Why a layer does not fit, without its name, and what can be done instead."""
    share = layer.shares[ranks]
    return share.alternatives, share.reason.replace(layer.prefix, "")


def _alternative_text(each: "Alternative") -> str:
    return f"{each.kind}: {escape(each.text)}; {format_size(max(each.bytes, 0))} more on the fullest rank"


def _world_text(ranks: int, world: "WorldPlan") -> Text:
    verdict = "ok" if world.fits else "no"
    rest = world_line(ranks, world).removeprefix(verdict)
    return Text(verdict, VERDICT_STYLES["ok"] if world.fits else "bold red").append(rest, "none")


def explanation_tables(found: "Explanation", *, every: bool) -> Iterator[RenderableType]:
    """The whole explanation; `every`: each layer, also where several are alike."""
    if found.unreadable or found.unsupported:
        why = escape(found.unreadable or found.unsupported)
        yield Text(found.verdict, "bold red").append(f"  {escape(found.path)}: {why}", "none")
        return
    rows = (
        ungrouped_rows(found.layers, name=_explained_prefix)
        if every
        else group_rows(found.layers, name=_explained_prefix, alike=_explained_kind)
    )
    for row in rows:
        yield from _explained_layer(row)
    rest = explanation_line(found).removeprefix(found.verdict)
    yield Text(found.verdict, VERDICT_STYLES.get(found.verdict, "bold red")).append(rest, "none")
    for note in found.notes:
        yield Text("note  ", "dim").append(escape(note), "none")


def _explained_prefix(layer: "ExplainedLayer") -> str:
    return layer.prefix


def _explained_kind(layer: "ExplainedLayer") -> Hashable:
    """What layers of one entry have in common."""
    bare = replace(layer, prefix="", error=layer.error.replace(layer.prefix, ""))
    return repr(bare)


def _explained_layer(row: "RowGroup[ExplainedLayer]") -> Iterator[RenderableType]:
    layer = row.first
    title = Text(join_words(escape_name(row.name)), "bold").append(
        f"  x{row.count}" if row.count > 1 else "", "none"
    )
    stored = "-" if layer.format is None else format_label(layer.format)
    made = "" if layer.kernel_format in (None, layer.format) else f" -> {layer.kernel_format}"
    yield title.append(f"  {escape(stored)}{made} {join_words(escape(layer.shape))}", "none")
    if layer.error:
        yield Paragraph(Text(escape(layer.error, keep="\n"), "red"), 4)
    for other, why in layer.formats.items():
        yield Paragraph(Text(f"not {other}: {escape(why)}", "dim"), 4)
    for choice in layer.choices:
        tokens = format_count(choice.tokens, "token")
        yield Paragraph(Text(f"{tokens}: ").append(choice.kernel, "green").append(f", {choice.time}"), 4)
        for other, why in choice.refused.items():
            yield Paragraph(Text(f"not {other}: {escape(why)}", "dim"), 8)
    for change in layer.changes:
        yield Paragraph(Text(f"would be taken with {escape(change)}", "yellow"), 4)
