"""The layers of a checkpoint: what the tensors say, and beside it what the config claims."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from qload.cli.tables import NamedRow, NameTable
from qload.cli.text import name, plural, safe, size
from qload.errors.causes import Fold, fold, unfolded
from qload.listing import format_label

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
        yield NameTable("layer", HEADER, [*_claimed(report.claims), *_rows(rows, report.claims)], ("bytes",))
    yield from _inputs(report.layers)
    if plain:
        yield Text(_summary(plain))
    if report.layers:
        total = sum(layer.bytes for layer in report.layers)
        yield Text(f"{plural(len(report.layers), 'layer')} in all, {size(total)}")


def _rows(rows: "Sequence[Fold[LayerInfo]]", claims: Mapping[str, Any]) -> Iterator[NamedRow]:
    for row in rows:
        yield NamedRow(name(row.name), _facts(row.first, claims), row.count)


def _claimed(claims: Mapping[str, Any]) -> Iterator[NamedRow]:
    """The config's own row, if there is a config."""
    if not claims:
        return
    form = " ".join(dict.fromkeys(map(format_label, (claims["method"], claims["format"]))))
    facts = [_value(claims[CLAIMS[fact]]) for fact in ("bits", "group_size", "sym", "act_order")]
    cells = [Text(cell) for cell in (safe(form), *facts, "", "", "")]
    yield NamedRow(f"{safe(claims['file'])} claims", cells, style="italic")


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
    if isinstance(value, bool):
        return ("no", "yes")[value]
    return safe(format_label(value) if isinstance(value, str) else value)


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
