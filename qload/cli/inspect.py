"""qload inspect: what a checkpoint holds, layer by layer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.hub import opened
from qload.cli.options import as_json, paths_argument, verbose
from qload.cli.output import emit
from qload.cli.ranks import by_first_alone
from qload.cli.summary import report_lines, several_lines, summarize
from qload.errors.verdicts import worst_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.hub import HubId
    from qload.verify import Report

EPILOG = """\b
Examples:
  qload inspect ./Llama-3-8B-GPTQ
  qload inspect ./Llama-3-8B-GPTQ --all
  qload inspect ./Llama-3-8B-GPTQ/model-00001-of-00004.safetensors
  qload inspect org/Llama-3-8B-GPTQ@main
  qload inspect ./Llama-3-8B-GPTQ --json | jq '.layers[0]'
  qload inspect ./models/* --json | jq -r '[.path, .verdict] | @tsv'

With several paths each has its own report; as JSON they are JSON Lines, an object a line.

Exit codes: 0 readable and in order, 1 findings or unreadable, 2 the command is wrong, 3 a bug of qload, 4 the
format or some tensors are not read. Of several paths the worst counts: 2, 3, 1, 4, 0."""


@click.command(epilog=EPILOG)
@paths_argument
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@as_json
@verbose
@click.pass_context
def inspect(ctx: click.Context, paths: "tuple[Path | HubId, ...]", every: bool, as_json: bool | None) -> None:
    """Show the layers of checkpoints.

    For each layer of the checkpoint at each PATH: format, bits, group size, symmetry, act order, shape
    (outputs, inputs), dtype and bytes, and where its config claims something else.

    It reads headers and small tensors only, so that the size of the files matters little. The time grows
    in proportion to the number of tensors. `qload verify` reads the rest.
    """
    by_first_alone(ctx)

    def tables(report: "Report") -> "Iterator[RenderableType]":
        from qload.cli.layers import layers
        from qload.cli.tables import findings, heading, verdict

        if len(paths) > 1:
            yield heading(report)
        yield from layers(report, every=every)
        yield verdict(report)
        yield from findings(report)

    from qload import native
    from qload.verify.report import refused_path

    native.check()
    codes, reports, several = [], [], len(paths) > 1
    for path in paths:
        with opened(path) as place:
            report = refused_path(place)
            if report is None:
                from qload.verify import inspect as run  # imports torch

                report = run(place)
        codes.append(emit(report, as_json, tables, report_lines, one_of_several=several))
        reports.append(replace(report, layers=()))
    if several:
        summarize(several_lines(reports), as_json)
    ctx.exit(worst_code(codes))
