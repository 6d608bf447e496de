"""The layers of a checkpoint: what the tensors say, and beside it what the config claims."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qload.cli.fold import Fold, fold, unfolded
from qload.cli.tables import table
from qload.cli.text import name, plural, safe, size

if TYPE_CHECKING:
    from qload.listing import LayerInfo
    from qload.verify import Report

PLAIN = "unquantized"
ALIKE = (
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
CLAIMS = {
    "format": "method",
    "bits": "bits",
    "group_size": "group_size",
    "sym": "sym",
    "act_order": "desc_act",
}
HEADER = ("format", "bits", "group", "sym", "act order", "(N, K)", "dtype", "bytes")


def layers(report: "Report", *, every: bool) -> Iterator[RenderableType]:
    """The layers, folded unless `every` one is asked for, and a line on the plain tensors among them."""
    plain = [layer for layer in report.layers if layer.format == PLAIN]
    listed = [layer for layer in report.layers if layer.format != PLAIN]
    if every or not listed:
        plain, listed = [], list(report.layers)
    if listed:
        rows = unfolded(listed, name=_prefix) if every else fold(listed, name=_prefix, alike=_kind)
        yield LayerTable(rows, report.claims)
    yield from _inputs(report.layers)
    if plain:
        yield Text(_summary(plain))
    if report.layers:
        total = sum(layer.bytes for layer in report.layers)
        yield Text(f"{plural(len(report.layers), 'layer')} in all, {size(total)}")


@dataclass
class LayerTable:
    """A row a layer where names fit beside their facts, a name above its facts where they do not."""

    rows: "Sequence[Fold[LayerInfo]]"
    claims: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        wide = self._wide()
        fits = Measurement.get(console, options.update(width=10_000), wide).maximum <= options.max_width
        yield wide if fits else self._narrow()

    def _wide(self) -> Table:
        shown = table()
        shown.add_column("layer")
        shown.add_column("count", justify="right")
        for column in HEADER:
            shown.add_column(column, justify="right" if column == "bytes" else "left")
        if self.claims:
            shown.add_row(self._source(), "", *_claimed(self.claims), style="italic", end_section=True)
        for row in self.rows:
            count = str(row.count) if row.count > 1 else ""
            shown.add_row(Text(name(row.name)), count, *_facts(row.first, self.claims))
        return shown

    def _narrow(self) -> Text:
        lines = [_facts(row.first, self.claims) for row in self.rows]
        cells = [[Text(column, "bold") for column in HEADER], _claimed(self.claims), *lines]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        names = [f"{name(row.name)}{f'  x{row.count}' if row.count > 1 else ''}" for row in self.rows]
        shown = Text("\n").append(_aligned(cells[0], widths))
        if self.claims:
            shown.append(f"{self._source()}\n", "italic").append(_aligned(cells[1], widths))
        for label, line in zip(names, lines, strict=True):
            shown.append(f"{label}\n").append(_aligned(line, widths))
        return shown

    def _source(self) -> str:
        return f"{safe(self.claims['file'])} claims"


def _aligned(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text("  ")
    for cell, width in zip(cells, widths, strict=True):
        line.append(cell).append(" " * (width - len(cell) + 2))
    line.rstrip()
    return line.append("\n")


def _claimed(claims: Mapping[str, Any]) -> list[Text]:
    """The config's own row."""
    if not claims:
        return [Text()] * len(HEADER)
    form = " ".join(dict.fromkeys((claims["method"], claims["format"])))
    facts = [_value(claims[CLAIMS[fact]]) for fact in ("bits", "group_size", "sym", "act_order")]
    return [Text(cell) for cell in (safe(form), *facts, "", "", "")]


def _facts(layer: "LayerInfo", claims: Mapping[str, Any]) -> list[Text]:
    """A layer's row."""
    own = layer.scale_dtype in (
        None,
        layer.dtype,
    )  # or the dtype is the weight's, and the scales have another
    dtype = layer.dtype if own else f"{layer.dtype}, scales {layer.scale_dtype}"
    rest = (safe(dtype), size(layer.bytes))
    return [*(_beside(layer, fact, claims) for fact in CLAIMS), _shape(layer), *map(Text, rest)]


def _shape(layer: "LayerInfo") -> Text:
    """What the tensors say; where the model's config claims another, that too."""
    if layer.expected in (None, layer.shape):
        return Text(str(layer.shape))
    return Text(f"{layer.shape} (claimed {layer.expected})", "yellow")


def _beside(layer: "LayerInfo", fact: str, claims: Mapping[str, Any]) -> Text:
    """What the tensors say, if they say it; where the config claims something else, that too."""
    value = getattr(layer, fact)
    key = CLAIMS[fact]
    own = getattr(layer.claims, key, claims.get(key))  # the entry of the config for this layer
    claim = None if layer.format == PLAIN else own
    if None in (claim, value) or claim == value:
        return Text(_value(value))
    return Text(f"{_value(value)} (claimed {_value(claim)})", "yellow")


def _value(value: object) -> str:
    if value is None:
        return "-"
    return ("no", "yes")[value] if isinstance(value, bool) else safe(value)


def _inputs(listed: Sequence["LayerInfo"]) -> Iterator[Text]:
    """A line for each way to quantize inputs that layers declare."""
    counts = Counter(str(layer.activations) for layer in listed if layer.activations is not None)
    for scheme, count in counts.most_common():
        yield Text(f"inputs quantized: {safe(scheme)}, of {plural(count, 'layer')}")


def _summary(plain: Sequence["LayerInfo"]) -> str:
    dtypes = Counter(layer.dtype for layer in plain)
    kinds = ", ".join(f"{count} {safe(dtype)}" for dtype, count in dtypes.most_common())
    total = size(sum(layer.bytes for layer in plain))
    return f"and {plural(len(plain), 'plain tensor')} ({kinds}; {total}), listed by --all"


def _prefix(layer: "LayerInfo") -> str:
    return layer.prefix


def _kind(layer: "LayerInfo") -> tuple[Any, ...]:
    return (*(getattr(layer, fact) for fact in ALIKE), str(layer.activations))
