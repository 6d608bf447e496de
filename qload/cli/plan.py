"""qload plan: among how many ranks a checkpoint can be shared, and what each of them holds."""

from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, as_json, experts_parallel, verbose, world_sizes
from qload.cli.output import emit
from qload.cli.ranks import by_first_alone
from qload.cli.summary import plan_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.hub import HubId
    from qload.plan import ShardingPlan

EPILOG = """\b
Examples:
  qload plan ./Llama-3-8B-GPTQ
  qload plan ./Llama-3-8B-GPTQ --tp 3,6
  qload plan ./Mixtral-8x7B-AWQ --tp 4,8 --ep 4
  qload plan ./Llama-3-8B-GPTQ --kernel marlin
  qload plan ./Llama-3-8B-GPTQ --json | jq '.worlds[] | .fits'

Exit codes: 0 all fits for each number of ranks, 1 something does not or it cannot be read, 2 the command is
wrong, 3 a bug of qload, 4 the format or some tensors are not read."""


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    callback=world_sizes,
    default="1,2,4,8",
    show_default=True,
    metavar="N[,N...]",
    help="Numbers of ranks.",
)
@experts_parallel
@click.option(
    "--kernel",
    type=click.Choice(["marlin", "strips", "panels", "exllama"]),
    help="The kernel whose layout has to say each quantized layer too.",
)
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@as_json
@verbose
@click.pass_context
def plan(
    ctx: click.Context,
    path: "Path | HubId",
    tp: tuple[int, ...],
    ep: int | None,
    kernel: "Literal['marlin', 'strips', 'panels', 'exllama'] | None",
    every: bool,
    as_json: bool | None,
) -> None:
    """Show among how many ranks a checkpoint can be shared.

    For each number of ranks: what each rank holds, and which layers cannot be cut, why not in the words of a
    load, what can be done instead, and what that costs. A model that qload runs is cut as loading it does;
    of other types layers are cut as is usual by their names.

    It reads headers and small tensors only, and no weight.
    """
    by_first_alone(ctx)
    from qload import native
    from qload.listing.report_base import make_report
    from qload.plan.report import ShardingPlan
    from qload.storage.checkpoint_files import locate

    def planned(place: "str | PathLike[str]") -> ShardingPlan:
        locate(place)  # refuses a wrong path before torch is imported
        from qload.plan import plan as run

        return run(place, tp=tp, ep=ep, target=kernel)

    native.check()
    with opened(path) as place:
        found = make_report(
            lambda: planned(place),
            lambda why: ShardingPlan(str(place), unreadable=why),
            lambda why: ShardingPlan(str(place), unsupported=why),
        )
    ctx.exit(emit(found, as_json, partial(_tables, every=every), plan_lines))


def _tables(found: "ShardingPlan", *, every: bool) -> "Iterator[RenderableType]":
    from qload.cli.plan_tables import tables

    return tables(found, every=every)
