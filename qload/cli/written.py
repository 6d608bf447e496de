"""How verbs that write a checkpoint tell what became of its layers."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.conversion import Conversion, ShardedCheckpoint


def tables(
    found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]
) -> "Iterator[RenderableType]":
    """The layers that are not well, the notes, and the verdict; `outcomes` in words."""
    from rich.text import Text

    from qload.cli.tables import STYLE
    from qload.cli.text import name, safe

    for layer in found.layers:
        if not layer.well:
            yield Text(layer.outcome, "red").append(f"  {name(layer.name)}", "none")
            yield Text(f"    {safe(layer.detail)}", "dim")
    for note in found.notes:
        yield Text(f"note  {safe(note)}")
    line = Text(found.verdict, STYLE.get(found.verdict, "bold red"))
    counts = [f"{count} {outcomes[outcome]}" for outcome, count in sorted(found.counts.items())]
    yield line.append(f"  {safe(found.unreadable or ', '.join(counts))}", "none")
