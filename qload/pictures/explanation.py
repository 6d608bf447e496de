"""What `explain` says, as a page: for each layer the kernels, and why not the others."""

from collections.abc import Iterator, Sequence

from qload.listing import format_label
from qload.pictures.in_pages import drawings_of
from qload.pictures.page import Page, ReportTable
from qload.plan import ExplainedLayer, Explanation, KernelChoice

WHY = "why not others"


def explanation_page(found: Explanation) -> str:
    """One page of HTML that needs nothing beside it."""
    tokens = list(dict.fromkeys(each.tokens for layer in found.layers for each in layer.choices))
    columns = ["layer", "format", "N", "K", "kernel format", *map(_title, tokens), WHY, "what would", "error"]
    facts = {
        "checkpoint": found.path,
        "chip": found.arch,
        "ranks": str(found.tp),
        "activations": found.dtype,
        "layers": str(len(found.layers)),
    }
    if found.unreadable or found.unsupported:
        facts[found.verdict] = found.unreadable or found.unsupported
    rows = [_row(layer, tokens) for layer in found.layers]
    return Page(
        title="qload explain",
        verdict=found.verdict,
        facts=facts,
        tables=[ReportTable("Layers", columns, rows, numbers=("N", "K"))],
        notes=found.notes,
        drawings=drawings_of(_lying(found)),
    ).html()


def _lying(found: Explanation) -> Iterator[tuple[str | None, int | None]]:
    """The formats that layers are stored in and repacked to, with the bits of codes."""
    for layer in found.layers:
        yield layer.format, layer.bits
        yield layer.kernel_format, layer.bits


def _row(layer: ExplainedLayer, tokens: Sequence[int]) -> list[str | int | None]:
    kernels = {choice.tokens: _kernel(choice) for choice in layer.choices}
    return [
        layer.prefix,
        layer.format and format_label(layer.format),
        layer.shape[0] if layer.shape else None,
        layer.shape[1] if len(layer.shape) > 1 else None,
        layer.kernel_format,
        *(kernels.get(count) for count in tokens),
        "\n".join(dict.fromkeys(_reasons(layer))) or None,
        "\n".join(layer.changes) or None,
        layer.error or None,
    ]


def _kernel(choice: KernelChoice) -> str:
    """By name, with the prediction of its time, or that it was not measured."""
    return f"{choice.kernel}, {choice.time}"


def _reasons(layer: ExplainedLayer) -> Iterator[str]:
    """Each reason once, although it holds for several numbers of tokens."""
    yield from (f"{name}: {why}" for name, why in layer.formats.items())
    for choice in layer.choices:
        yield from (f"{name}: {why}" for name, why in choice.refused.items())


def _title(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"
