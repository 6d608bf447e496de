"""What verbs that write a checkpoint share: where to, in how large files, and what became of its layers."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qload.cli.options import output_folder

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.conversion import Conversion, ShardedCheckpoint

F = TypeVar("F", bound=Callable[..., Any])
GIGABYTE = 1_000_000_000
LARGEST_FILE = 2**63 - 1  # bytes: places in a file are signed numbers of 64 bits
new_folder = output_folder("Where to; not there yet, or empty.")


def shard_size(function: F) -> F:
    """--shard-size, asked for in gigabytes and told in bytes, at least 1."""
    return click.option(
        "--shard-size",
        type=click.FloatRange(min=0, min_open=True),
        default=5,
        show_default=True,
        metavar="GB",
        callback=_bytes,
        help="Of how many gigabytes a file is at most.",
    )(function)


def _bytes(ctx: click.Context, param: click.Parameter, value: float) -> int:
    size = value * GIGABYTE
    if not size <= LARGEST_FILE:
        most = LARGEST_FILE // GIGABYTE
        raise click.BadParameter(
            f"{value} GB is the size of no file, which has at most {most} GB", ctx, param
        )
    return max(1, int(size))


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
    yield line.append(f"  {safe(found.unreadable or found.unsupported or ', '.join(counts))}", "none")
