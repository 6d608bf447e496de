"""Tables of layers in reports: stored formats, tensor-parallel plans, and kernel choices."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from qload.checkpoint import format_label
from qload.cli.tables import NamedRow, NameTable, Paragraph, color_verdict, join_words, note_texts
from qload.cli.text import (
    escape,
    escape_name,
    explanation_line,
    format_count,
    format_size,
    refusal_line,
    world_line,
)
from qload.errors.reporting import RowGroup, group_by_cause, group_rows

if TYPE_CHECKING:
    from qload.checkpoint import LayerInfo
    from qload.plan import (
        Alternative,
        ExplainedLayer,
        Explanation,
        PlannedLayer,
        ShardingPlan,
    )
    from qload.verify import Report

UNQUANTIZED = "unquantized"
# Layers that are equal in these fields, and in their activations, share a row.
ROW_FIELDS = (
    "format", "bits", "group_size", "sym", "act_order", "shape", "expected", "dtype", "scale_dtype", "bytes",
)  # fmt: skip
# Field of a layer -> key of the config.
CLAIM_KEYS = {
    "format": "method",
    "bits": "bits",
    "group_size": "group_size",
    "sym": "sym",
    "act_order": "desc_act",
}
LAYER_COLUMNS = ("format", "bits", "group", "sym", "act order", "(N, K)", "dtype", "bytes")
CUT_NAMES = {"N": "outputs", "K": "inputs", "experts": "whole experts", "whole": "not cut"}
layer_prefix = attrgetter("prefix")


def contents_tables(report: "Report", *, every: bool) -> Iterator[RenderableType]:
    """Format the layers of a report, with a line on the unquantized ones; `every`: a row per layer."""
    plain = [layer for layer in report.layers if layer.format == UNQUANTIZED]
    layers = [layer for layer in report.layers if layer.format != UNQUANTIZED]
    if every or not layers:
        plain, layers = [], list(report.layers)
    if layers:
        rows = [
            NamedRow(escape_name(row.name), _layer_cells(row.first, report.claims), row.count)
            for row in group_rows(layers, name=layer_prefix, key=None if every else _stored_key)
        ]
        yield NameTable("layer", LAYER_COLUMNS, [*_config_rows(report.claims), *rows], ("bytes",))
    yield from _activation_lines(report.layers)
    if plain:
        yield Text(_unquantized_line(plain))
    if report.layers:
        total = sum(layer.bytes for layer in report.layers)
        yield Text(f"{format_count(len(report.layers), 'layer')} in all, {format_size(total)}")


def _config_rows(claims: Mapping[str, Any]) -> Iterator[NamedRow]:
    """Format the claims of the config, if there is one, as the first row."""
    if not claims:
        return
    label = " ".join(dict.fromkeys(map(format_label, (claims["method"], claims["format"]))))
    facts = [_cell_text(claims[CLAIM_KEYS[field]]) for field in ("bits", "group_size", "sym", "act_order")]
    cells = [Text(cell) for cell in (escape(label), *facts, "", "", "")]
    yield NamedRow(f"{escape(claims['file'])} claims", cells, style="italic")


def _layer_cells(layer: "LayerInfo", claims: Mapping[str, Any]) -> list[Text]:
    # Where the two dtypes differ, the first is that of the weight.
    equal = layer.scale_dtype in (None, layer.dtype)
    dtype = layer.dtype if equal else f"{layer.dtype}, scales {layer.scale_dtype}"
    claim_cells = (_claim_cell(layer, field, claims) for field in CLAIM_KEYS)
    return [*claim_cells, _shape_cell(layer), Text(escape(dtype)), Text(format_size(layer.bytes))]


def _shape_cell(layer: "LayerInfo") -> Text:
    """Format the stored shape, and the shape claimed by the model's config if it differs."""
    if layer.expected in (None, layer.shape):
        return Text(str(layer.shape))
    return Text(f"{layer.shape} (claimed {layer.expected})", "yellow")


def _claim_cell(layer: "LayerInfo", field: str, claims: Mapping[str, Any]) -> Text:
    """Format a stored field, and the config's claim for this layer if it differs."""
    value, key = getattr(layer, field), CLAIM_KEYS[field]
    claim = None if layer.format == UNQUANTIZED else getattr(layer.claims, key, claims.get(key))
    if None in (claim, value) or claim == value:
        return Text(_cell_text(value))
    return Text(f"{_cell_text(value)} (claimed {_cell_text(claim)})", "yellow")


def _cell_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return escape(format_label(value) if isinstance(value, str) else value)


def _activation_lines(layers: Sequence["LayerInfo"]) -> Iterator[Text]:
    """Format a line per activation scheme of the layers."""
    counts = Counter(str(layer.activations) for layer in layers if layer.activations is not None)
    for scheme, count in counts.most_common():
        yield Text(f"inputs quantized: {escape(scheme)}, of {format_count(count, 'layer')}")


def _unquantized_line(plain: Sequence["LayerInfo"]) -> str:
    dtypes = Counter(layer.dtype for layer in plain)
    kinds = ", ".join(f"{count} {escape(dtype)}" for dtype, count in dtypes.most_common())
    total = format_size(sum(layer.bytes for layer in plain))
    return f"and {format_count(len(plain), 'unquantized layer')} ({kinds}; {total}), listed by --all"


def _stored_key(layer: "LayerInfo") -> Hashable:
    return (*(getattr(layer, field) for field in ROW_FIELDS), str(layer.activations))


def plan_tables(plan: "ShardingPlan", *, every: bool) -> Iterator[RenderableType]:
    """Format a plan: bytes of each layer per rank, refused layers, and bytes per rank.

    `every`: a row per layer.
    """
    if refusal := refusal_line(plan):
        yield color_verdict(plan.verdict, refusal)
        return
    yield _share_table(plan, every=every)
    for ranks in plan.worlds:
        yield from _refused_layers(plan.layers, ranks, every=every)
    for ranks, world in plan.worlds.items():
        yield color_verdict("ok" if world.fits else "no", world_line(ranks, world))
    if plan.lawful is not None:
        yield Text("lawful  ", "green").append(escape(plan.lawful.text()), "none")
    yield from note_texts(plan.notes)


def _planned_key(layer: "PlannedLayer") -> Hashable:
    """Return the facts of a planned layer except its name, as the key of its row."""
    shares = (
        (share.bytes, share.alternatives, share.reason.replace(layer.prefix, ""))
        for share in layer.shares.values()
    )
    return layer.format, layer.shape, layer.cut, tuple(shares)


def _share_table(plan: "ShardingPlan", *, every: bool) -> NameTable:
    """Format the bytes of each layer on the fullest rank, for each number of ranks."""
    titles = [format_count(ranks, "rank") for ranks in plan.worlds]
    rows = []
    for row in group_rows(plan.layers, name=layer_prefix, key=None if every else _planned_key):
        layer = row.first
        label = "-" if layer.format is None else format_label(layer.format)
        facts = map(Text, (escape(label), escape(layer.shape), CUT_NAMES[layer.cut]))
        shares = (layer.shares[ranks] for ranks in plan.worlds)
        sizes = (Text(format_size(max(share.bytes))) if share.fits else Text("no", "red") for share in shares)
        rows.append(NamedRow(escape_name(row.name), [*facts, *sizes], row.count))
    return NameTable("layer", ("format", "(N, K)", "cut", *titles), rows, titles)


def _refused_layers(layers: "Sequence[PlannedLayer]", ranks: int, *, every: bool) -> Iterator[RenderableType]:
    """Format the layers that cannot be sharded, grouped by reason, with their alternatives.

    `every`: one layer per group.
    """
    groups = group_by_cause(
        (layer for layer in layers if not layer.shares[ranks].fits),
        name=layer_prefix,
        cause=lambda layer: layer.prefix if every else _refusal_key(layer, ranks),
    )
    for group in groups:
        first = group.first.shares[ranks]
        title = Text(f"{format_count(ranks, 'rank')}  ", "bold red")
        places = [join_words(escape_name(place)) for place in group.places()]
        count = f"  x{group.count}" if group.count > 1 else ""
        yield title.append(("\n" + " " * len(title.plain)).join(places), "none").append(count)
        yield Paragraph(Text(escape(first.reason, keep="\n")), 4)
        for alternative in first.alternatives:
            yield Paragraph(Text("instead  ", "green").append(_alternative_text(alternative), "none"), 4)


def _refusal_key(layer: "PlannedLayer", ranks: int) -> Hashable:
    """Return the reason of a refusal without the layer's name, and the alternatives."""
    share = layer.shares[ranks]
    return share.alternatives, share.reason.replace(layer.prefix, "")


def _alternative_text(alternative: "Alternative") -> str:
    more = format_size(max(alternative.bytes, 0))
    return f"{alternative.kind}: {escape(alternative.text)}; {more} more on the fullest rank"


def explanation_tables(explanation: "Explanation", *, every: bool) -> Iterator[RenderableType]:
    """Format an explanation: the kernels of each layer, and the reasons against the others.

    `every`: an entry per layer.
    """
    if refusal := refusal_line(explanation):
        yield color_verdict(explanation.verdict, refusal)
        return
    key = None if every else _explained_key
    for row in group_rows(explanation.layers, name=layer_prefix, key=key):
        yield from _explained_layer(row)
    yield color_verdict(explanation.verdict, explanation_line(explanation))
    for note in explanation.notes:
        yield Text("note  ", "dim").append(escape(note), "none")


def _explained_key(layer: "ExplainedLayer") -> Hashable:
    """Return the facts of an explained layer except its name, as the key of its entry."""
    return repr(replace(layer, prefix="", error=layer.error.replace(layer.prefix, "")))


def _explained_layer(row: "RowGroup[ExplainedLayer]") -> Iterator[RenderableType]:
    layer = row.first
    count = f"  x{row.count}" if row.count > 1 else ""
    title = Text(join_words(escape_name(row.name)), "bold").append(count, "none")
    label = "-" if layer.format is None else format_label(layer.format)
    target = "" if layer.kernel_format in (None, layer.format) else f" -> {layer.kernel_format}"
    yield title.append(f"  {escape(label)}{target} {join_words(escape(layer.shape))}", "none")
    if layer.error:
        yield Paragraph(Text(escape(layer.error, keep="\n"), "red"), 4)
    for name, reason in layer.formats.items():
        yield Paragraph(Text(f"{name}: {escape(reason)}", "dim"), 4)
    for choice in layer.choices:
        tokens = format_count(choice.tokens, "token")
        yield Paragraph(Text(f"{tokens}: ").append(choice.kernel, "green").append(f", {choice.time}"), 4)
        for name, reason in choice.refused.items():
            yield Paragraph(Text(f"{name}: {escape(reason)}", "dim"), 8)
    for change in layer.changes:
        yield Paragraph(Text(f"would be taken with {escape(change)}", "yellow"), 4)
