"""The verbs plan and explain: tensor-parallel plans of a checkpoint, and the kernel of each layer."""

from collections.abc import Callable, Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import (
    CheckpointPath,
    all_option,
    experts_parallel_option,
    html_option,
    parse_counts,
    report_options,
    world_sizes_option,
)
from qload.cli.output import exit_other_ranks, print_report, write_file
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

Exit codes: 0 every layer can be sharded for each number of ranks, 1 some cannot, or PATH is unreadable, 2 the
command is wrong, 3 a bug of qload, 4 the format is unsupported or some tensors are not read."""
EXPLAIN_EPILOG = """\b
Examples:
  qload explain ./Llama-3-8B-GPTQ
  qload explain ./Llama-3-8B-GPTQ --arch sm90 --tp 4 --dtype float16
  qload explain ./Llama-3-8B-GPTQ --arch sm80 --json | jq '.layers[0].choices'

Exit codes: 0 the first layer of each kind can be loaded, 1 one cannot, or PATH is unreadable, 2 the command
is wrong, 3 a bug of qload, 4 the format is unsupported or some tensors are not read."""
ReportT = TypeVar("ReportT", "ShardingPlan", "Explanation")
ACTIVATION_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@click.command(epilog=PLAN_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@world_sizes_option("Numbers of ranks.", default="1,2,4,8", show_default=True)
@experts_parallel_option
@click.option(
    "--kernel",
    type=click.Choice(["marlin", "strips", "panels", "exllama"]),
    help="Also require that each quantized layer can be repacked for this kernel.",
)
@all_option
@report_options
def plan(
    ctx: click.Context,
    path: "Path | HubId",
    tp: tuple[int, ...],
    ep: int | None,
    kernel: "Literal['marlin', 'strips', 'panels', 'exllama'] | None",
    every: bool,
    as_json: bool | None,
) -> None:
    """Show the numbers of ranks that can share a checkpoint.

    For each number of ranks: the bytes of each rank, the layers that cannot be cut with the error that
    loading would raise, and the alternatives with their costs. The layers of a supported model type are cut
    as loading cuts them; those of other types are cut by the usual meaning of their names.

    Only headers and small tensors are read, and no weights.
    """
    exit_other_ranks(ctx)
    from qload.plan.report import ShardingPlan

    def make_plan(place: "str | PathLike[str]") -> ShardingPlan:
        from qload.plan import plan  # imports torch

        return plan(place, tp=tp, ep=ep, target=kernel)

    def tables(plan: ShardingPlan) -> "Iterator[RenderableType]":
        from qload.cli.layer_tables import plan_tables

        return plan_tables(plan, every=every)

    report = _report_path(path, make_plan, ShardingPlan)
    ctx.exit(print_report(report, as_json, tables, plan_lines))


@click.command(epilog=EXPLAIN_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--arch",
    metavar="ARCH",
    help="Target: cpu, or a GPU architecture such as sm80 or sm90, present or not. Default: this machine.",
)
@click.option(
    "--tp", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Number of ranks."
)
@click.option(
    "--dtype",
    type=click.Choice([*ACTIVATION_DTYPES, *ACTIVATION_DTYPES.values()]),
    help="Dtype of the activations. Default: the dtype in config.json, else bf16.",
)
@click.option(
    "--tokens",
    callback=parse_counts("tokens"),
    default="1,64,1024",
    show_default=True,
    metavar="M[,M...]",
    help="Numbers of tokens in a call.",
)
@html_option("the explanation")
@all_option
@report_options
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
    """Show the kernel of each layer.

    The other kernels are listed with the reasons against them. No GPU is needed. Layers are repacked as a
    load for ARCH repacks them, except for their codes, and kernels are chosen by the dispatch table of real
    calls. Times are predictions with their basis, or "not measured".
    """
    exit_other_ranks(ctx)
    from qload.plan.report import Explanation

    def make_explanation(place: "str | PathLike[str]") -> Explanation:
        import torch

        from qload.plan import explain

        activations = None if dtype is None else getattr(torch, ACTIVATION_DTYPES.get(dtype, dtype))
        return explain(place, arch=arch, tp=tp, dtype=activations, tokens=tokens)

    def tables(explanation: Explanation) -> "Iterator[RenderableType]":
        from qload.cli.layer_tables import explanation_tables

        return explanation_tables(explanation, every=every)

    report = _report_path(path, make_explanation, Explanation)
    if html is not None:
        from qload.pictures import explanation_page

        write_file(html, explanation_page(report))
    ctx.exit(print_report(report, as_json, tables, explanation_lines))


def _report_path(
    path: "Path | HubId", make: "Callable[[str | PathLike[str]], ReportT]", report_type: "type[ReportT]"
) -> "ReportT":
    """Open a path and make its report; that of an unreadable or unsupported checkpoint has no layers."""
    from qload import native
    from qload.checkpoint.report_base import make_report
    from qload.storage.checkpoint_files import locate

    native.check()
    with open_path(path) as place:

        def make_checked() -> "ReportT":
            locate(place)  # refuses a wrong path before torch is imported
            return make(place)

        return make_report(make_checked, partial(report_type, str(place)))
