"""The verbs plan and explain: tensor-parallel plans of a checkpoint, and the kernel of each layer."""

from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import (
    CheckpointPath,
    HtmlFile,
    experts_parallel_option,
    json_option,
    parse_numbers,
    parse_world_sizes,
    verbose_option,
)
from qload.cli.output import exit_other_ranks, print_report
from qload.cli.text import explanation_lines, plan_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.hub import HubId
    from qload.plan import Explanation, ShardingPlan

PLAN_EPILOG = """\b
Examples:
  qload plan ./Llama-3-8B-GPTQ
  qload plan ./Llama-3-8B-GPTQ --tp 3,6
  qload plan ./Mixtral-8x7B-AWQ --tp 4,8 --ep 4
  qload plan ./Llama-3-8B-GPTQ --kernel marlin
  qload plan ./Llama-3-8B-GPTQ --json | jq '.worlds[] | .fits'

Exit codes: 0 all fits for each number of ranks, 1 something does not or it cannot be read, 2 the command is
wrong, 3 a bug of qload, 4 the format or some tensors are not read."""


@click.command(epilog=PLAN_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    callback=parse_world_sizes,
    default="1,2,4,8",
    show_default=True,
    metavar="N[,N...]",
    help="Numbers of ranks.",
)
@experts_parallel_option
@click.option(
    "--kernel",
    type=click.Choice(["marlin", "strips", "panels", "exllama"]),
    help="The kernel whose layout has to say each quantized layer too.",
)
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@json_option
@verbose_option
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
    exit_other_ranks(ctx)
    from qload import native
    from qload.listing.report_base import make_report
    from qload.plan.report import ShardingPlan
    from qload.storage.checkpoint_files import locate

    def planned(place: "str | PathLike[str]") -> ShardingPlan:
        locate(place)  # refuses a wrong path before torch is imported
        from qload.plan import plan as run

        return run(place, tp=tp, ep=ep, target=kernel)

    native.check()
    with open_path(path) as place:
        found = make_report(
            lambda: planned(place),
            lambda why: ShardingPlan(str(place), unreadable=why),
            lambda why: ShardingPlan(str(place), unsupported=why),
        )
    ctx.exit(print_report(found, as_json, partial(_plan_tables, every=every), plan_lines))


def _plan_tables(found: "ShardingPlan", *, every: bool) -> "Iterator[RenderableType]":
    from qload.cli.layer_tables import plan_tables

    return plan_tables(found, every=every)


EXPLAIN_EPILOG = """\b
Examples:
  qload explain ./Llama-3-8B-GPTQ
  qload explain ./Llama-3-8B-GPTQ --arch sm90 --tp 4 --dtype float16
  qload explain ./Llama-3-8B-GPTQ --arch sm80 --json | jq '.layers[0].choices'

Exit codes: 0 each layer can be loaded so, 1 one cannot or the checkpoint cannot be read, 2 the command is
wrong, 3 a bug of qload, 4 the format or some tensors are not read."""
ACTIVATION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@click.command(epilog=EXPLAIN_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--arch",
    metavar="ARCH",
    help="sm80, sm90 and the like, or cpu; it need not be here. Default: this machine.",
)
@click.option(
    "--tp", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Number of ranks."
)
@click.option(
    "--dtype",
    type=click.Choice([*ACTIVATION_DTYPES, *ACTIVATION_DTYPES.values()]),
    help="Of the activations. Default: the dtype that config.json names, or bf16 where it names none.",
)
@click.option(
    "--tokens",
    callback=parse_numbers("tokens"),
    default="1,64,1024",
    show_default=True,
    metavar="M[,M...]",
    help="Numbers of rows that are multiplied at once.",
)
@click.option(
    "--html",
    type=HtmlFile(),
    metavar="FILE",
    help="Write it to FILE too, as a page with a table to sort and filter.",
)
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@json_option
@verbose_option
@click.pass_context
def explain(
    ctx: click.Context,
    path: "Path | HubId",
    arch: str | None,
    tp: int,
    dtype: str | None,
    tokens: tuple[int, ...],
    html: Path | None,
    every: bool,
    as_json: bool | None,
) -> None:
    """Show which kernel multiplies each layer, and why not each other one.

    No GPU is needed: layers are repacked, but for their codes, as loading for ARCH repacks them, and kernels
    are chosen by the table that calls choose by. A time is a prediction with its basis, or "not measured".
    """
    exit_other_ranks(ctx)
    from qload import native
    from qload.listing.report_base import make_report
    from qload.plan.report import Explanation
    from qload.storage.checkpoint_files import locate

    def explained(place: "str | PathLike[str]") -> Explanation:
        locate(place)  # refuses a wrong path before torch is imported
        import torch

        from qload.plan import explain as run

        activations = None if dtype is None else getattr(torch, ACTIVATION_DTYPES.get(dtype, dtype))
        return run(place, arch=arch, tp=tp, dtype=activations, tokens=tokens)

    native.check()
    with open_path(path) as place:
        found = make_report(
            lambda: explained(place),
            lambda why: Explanation(str(place), unreadable=why),
            lambda why: Explanation(str(place), unsupported=why),
        )
    if html is not None:
        from qload.errors.exceptions import written_to
        from qload.pictures import explanation_page

        with written_to(html):
            html.write_text(explanation_page(found), encoding="utf-8")
    ctx.exit(print_report(found, as_json, partial(_explanation_tables, every=every), explanation_lines))


def _explanation_tables(found: "Explanation", *, every: bool) -> "Iterator[RenderableType]":
    from qload.cli.layer_tables import explanation_tables

    return explanation_tables(found, every=every)
