"""qload verify: is this checkpoint true?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.options import CheckpointPath, as_json, path_argument, verbose
from qload.cli.output import emit, progress_bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.verify import Report

EPILOG = """\b
Examples:
  qload verify ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 4
  qload verify ./Llama-3-8B-GPTQ --against ./Llama-3-8B
  qload verify ./Llama-3-8B-GPTQ --json | jq -r '.findings[].message'

Each rule has a page, docs/rules/RULE.md.

Exit codes: 0 in order, 1 findings or unreadable, 2 the command is wrong."""


@click.command(epilog=EPILOG)
@path_argument
@click.option(
    "--against",
    type=CheckpointPath(),
    metavar="DIR",
    help="Compare every layer with the same layer of another checkpoint of this model.",
)
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="Check too that every tensor can be cut for N ranks.",
)
@as_json
@verbose
@click.pass_context
def verify(
    ctx: click.Context, path: Path, against: Path | None, tp: int | None, as_json: bool | None
) -> None:
    """Say whether the checkpoint at PATH is true, rule by rule: headers, then values, then meaning.

    It streams: peak memory is a few layers, whatever the size of the checkpoint.
    """
    with progress_bar() as progress:
        from qload.verify import verify as run

        report = run(path, against=against, tp=tp, progress=progress)
    ctx.exit(emit(report, as_json, _tables))


def _tables(report: "Report") -> "Iterator[RenderableType]":
    from qload.cli.tables import findings, verdict

    yield verdict(report)
    yield from findings(report)
