"""qload verify: is this checkpoint true?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.options import CheckpointPath, as_json, path_argument, verbose
from qload.cli.output import emit
from qload.cli.progress import progress_bar
from qload.cli.ranks import ranks

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.verify import Report
    from qload.verify.rules import Tier

EPILOG = """\b
Examples:
  qload verify ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 4
  qload verify ./Llama-3-8B-GPTQ --tier headers
  qload verify ./Llama-3-8B-GPTQ --against ./Llama-3-8B
  qload verify ./Llama-3-8B-GPTQ --json | jq -r '.findings[].message'
  torchrun --nproc-per-node 8 -m qload verify ./DeepSeek-V3

Each rule has a page, docs/rules/RULE.md.

Exit codes: 0 nothing found, 1 findings or unreadable, 2 the command is wrong."""


@click.command(epilog=EPILOG)
@path_argument
@click.option(
    "--against",
    type=CheckpointPath(),
    metavar="DIR",
    help="Compare each layer with the same layer of another checkpoint of this model.",
)
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(min=1),
    metavar="N",
    help="Check too that each layer can be shared among N ranks.",
)
@click.option(
    "--tier",
    type=click.Choice(["headers", "values", "meaning"]),
    default="meaning",
    show_default=True,
    help="The last tier of rules to ask; headers reads no weight.",
)
@as_json
@verbose
@click.pass_context
def verify(
    ctx: click.Context,
    path: Path,
    against: Path | None,
    tp: int | None,
    tier: "Tier",
    as_json: bool | None,
) -> None:
    """Find what is wrong with a checkpoint.

    The rules look at headers, then at values, then at what the config claims of them. A checkpoint in which
    nothing is found contradicts neither itself nor its config; it can still hold other weights than were
    meant, which only --against can find.

    It reads files piece by piece, so that a checkpoint may be larger than the memory. Threads share the
    layers, as many as QLOAD_NUM_THREADS says; under torchrun processes and hosts share them too, and the
    first process prints the one report.
    """
    with ranks() as group:
        with progress_bar(seen=group is None or group.rank() == 0) as progress:
            from qload import native
            from qload.verify import verify as run

            native.check()

            report = run(path, against=against, tp=tp, tier=tier, progress=progress, process_group=group)
        if group is not None and group.rank() > 0:
            ctx.exit(0)  # the verdict is the first process' to tell
        code = emit(report, as_json, _tables)
    ctx.exit(code)


def _tables(report: "Report") -> "Iterator[RenderableType]":
    from qload.cli.tables import findings, verdict

    yield verdict(report)
    yield from findings(report)
