"""What verbs that write a checkpoint share: where to, in how large files, and what became of its layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qload.cli.options import output_folder
from qload.cli.summary import counts, finding_lines, layer_lines, note_lines
from qload.cli.text import plural

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.conversion import Conversion, ShardedCheckpoint
    from qload.verify import Finding

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

    from qload.cli import tables as shared

    yield from shared.outcomes((layer for layer in found.layers if not layer.well), {})
    findings = errors_of(found)
    if findings:
        yield shared.FindingTable(findings)
    yield from shared.notes(found.notes)
    yield Text(found.verdict, shared.STYLE.get(found.verdict, "bold red")).append(
        f"  {_came_to(found, outcomes)}", "none"
    )


def summary(found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> Iterator[str]:
    """The verdict, and a line for each reason why a checkpoint or a layer is not well."""
    yield f"{found.verdict}  {_came_to(found, outcomes)}"
    yield from finding_lines(errors_of(found))
    yield from layer_lines(
        (layer.outcome, layer.name, layer.detail) for layer in found.layers if not layer.well
    )
    yield from note_lines(found.notes)


def errors_of(found: "Conversion | ShardedCheckpoint") -> "Sequence[Finding]":
    """Errors of headers, which `convert` looks for."""
    return getattr(found, "findings", ())


def _came_to(found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> str:
    errors = errors_of(found)
    if errors:
        refused = f"{plural(len(errors), 'error')} in the header tier of verify, so that nothing was written"
        return f"{refused}; --accept RULE converts all the same"
    return counts(found, outcomes)
