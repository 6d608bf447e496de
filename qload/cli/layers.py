"""The table of layers: what the tensors say, and beside it what the config claims."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from qload.cli.fold import Fold, fold, unfolded
from qload.cli.tables import table
from qload.cli.text import name, plural, safe, size

if TYPE_CHECKING:
    from qload.verify import LayerInfo, Report

PLAIN = "unquantized"
ALIKE = ("format", "bits", "group_size", "sym", "act_order", "shape", "dtype", "bytes")
CLAIMED = {  # a fact of the tensors -> its name in the config
    "format": "method",
    "bits": "bits",
    "group_size": "group_size",
    "sym": "sym",
    "act_order": "desc_act",
}
COLUMNS = ("layer", "count", "format", "bits", "group", "sym", "act\norder", "shape (N, K)", "dtype", "bytes")


def layers(report: "Report", *, every: bool) -> Iterator[RenderableType]:
    """The layers, folded unless `every` one is asked for, and a line on the plain tensors among them."""
    plain = [layer for layer in report.layers if layer.format == PLAIN]
    listed = [layer for layer in report.layers if layer.format != PLAIN]
    if every or not listed:
        plain, listed = [], list(report.layers)
    if listed:
        rows = unfolded(listed, name=_prefix) if every else fold(listed, name=_prefix, alike=_kind)
        yield _layers(rows, report.claims)
    if plain:
        yield Text(_plain(plain))
    if report.layers:
        total = sum(layer.bytes for layer in report.layers)
        yield Text(f"{plural(len(report.layers), 'layer')} in all, {size(total)}")


def _layers(rows: Iterable["Fold[LayerInfo]"], claims: Any) -> Table:
    shown = table()
    for column in COLUMNS:
        shown.add_column(column, overflow="fold", justify="right" if column in ("count", "bytes") else "left")
    if claims:
        shown.add_row(*_claims(claims), style="italic", end_section=True)
    for row in rows:
        shown.add_row(*_layer(row, claims))
    return shown


def _claims(claims: Any) -> list[Text]:
    """The config's own row, above the layers."""
    form = " ".join(dict.fromkeys((claims["method"], claims["format"])))
    cells = [f"{claims['file']} claims", "", form]
    cells += [_value(claims[CLAIMED[fact]]) for fact in ("bits", "group_size", "sym", "act_order")]
    return [Text(safe(cell)) for cell in [*cells, "", "", ""]]


def _layer(row: "Fold[LayerInfo]", claims: Any) -> list[Text]:
    layer = row.first
    facts = [_beside(layer, fact, claims) for fact in ("format", "bits", "group_size", "sym", "act_order")]
    count = Text(str(row.count) if row.count > 1 else "")
    rest = [Text(str(layer.shape)), Text(safe(layer.dtype)), Text(size(layer.bytes))]
    return [Text(name(row.name)), count, *facts, *rest]


def _beside(layer: "LayerInfo", fact: str, claims: Any) -> Text:
    """What the tensors say; where the config claims something else, that too."""
    value = getattr(layer, fact)
    claim = claims.get(CLAIMED[fact]) if claims and layer.format != PLAIN else None
    if claim is None or claim == value:
        return Text(_value(value))
    return Text(f"{_value(value)} (claimed {_value(claim)})", "yellow")


def _value(value: object) -> str:
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else safe(value)


def _plain(layers: Sequence["LayerInfo"]) -> str:
    dtypes = Counter(layer.dtype for layer in layers)
    kinds = ", ".join(f"{count} {safe(dtype)}" for dtype, count in dtypes.most_common())
    total = size(sum(layer.bytes for layer in layers))
    return f"and {plural(len(layers), 'plain tensor')} ({kinds}; {total}), listed by --all"


def _prefix(layer: "LayerInfo") -> str:
    return layer.prefix


def _kind(layer: "LayerInfo") -> tuple[Any, ...]:
    return tuple(getattr(layer, fact) for fact in ALIKE)
