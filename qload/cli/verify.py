"""qload verify: is this checkpoint true?"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.folders import folders_of
from qload.cli.hub import opened
from qload.cli.options import (
    CheckpointPath,
    as_json,
    folders,
    paths_argument,
    verbose,
    world_sizes,
)
from qload.cli.output import emit
from qload.cli.pages import PageFile
from qload.cli.progress import named, progress_bar
from qload.cli.ranks import ranks
from qload.cli.run import token_ids
from qload.cli.sarif import STDOUT, SarifFile, write
from qload.cli.summary import report_lines, several_lines, summarize
from qload.errors.verdicts import worst_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.hub import HubId
    from qload.verify import Report
    from qload.verify.rules import Tier

EPILOG = """\b
Examples:
  qload verify ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 1,2,4
  qload verify ./Llama-3-8B-GPTQ --tier headers
  qload verify ./Llama-3-8B-GPTQ --against ./Llama-3-8B
  qload verify ./Llama-3-8B-GPTQ --logits --device cuda
  qload verify ./Llama-3-8B-GPTQ --logits --prompt-ids 128000,9906 --against ./Llama-3-8B
  qload verify org/Llama-3-8B-GPTQ@main
  qload verify ./Llama-3-8B-GPTQ --json | jq -r '.findings[].message'
  qload verify ./models/* --json | jq -r '[.path, .verdict] | @tsv'
  qload verify ./models/* --sarif findings.sarif
  torchrun --nproc-per-node 8 -m qload verify ./DeepSeek-V3

With several paths each has its own report; as JSON they are JSON Lines, an object a line. Each rule has a
page, docs/rules/RULE.md.

Exit codes: 0 nothing found, 1 findings or unreadable, 2 the command is wrong, 3 a bug of qload, 4 the format
or some tensors are not read. Of several paths the worst counts: 2, 3, 1, 4, 0."""


@click.command(epilog=EPILOG)
@paths_argument
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
    callback=world_sizes,
    metavar="N[,N...]",
    help="Check too that each layer can be shared among N ranks, for each N.",
)
@click.option(
    "--tier",
    type=click.Choice(["headers", "values", "meaning"]),
    default="meaning",
    show_default=True,
    help="The last tier of rules to ask; headers reads no weight.",
)
@click.option(
    "--logits",
    is_flag=True,
    help="Run the model, by kernels and by dequantized weights, and compare each layer and the logits.",
)
@click.option(
    "--prompt-ids",
    callback=token_ids,
    metavar="ID[,ID...]",
    help="What --logits runs it on. Default: 24 token ids that are drawn, always the same.",
)
@click.option("--device", metavar="DEVICE", help="Where --logits runs it: cpu, or cuda.  [default: cpu]")
@click.option(
    "--sarif",
    type=SarifFile(),
    metavar="FILE",
    help="Write the findings to FILE too, as SARIF 2.1.0 for code scanning; -: to standard output, alone.",
)
@click.option(
    "--html",
    type=PageFile(),
    metavar="FILE",
    help="Write the report of the one PATH to FILE too, as a page with tables to sort and filter.",
)
@folders
@as_json
@verbose
@click.pass_context
def verify(
    ctx: click.Context,
    paths: "tuple[Path | HubId, ...]",
    against: "Path | HubId | None",
    tp: tuple[int, ...] | None,
    tier: "Tier",
    logits: bool,
    prompt_ids: tuple[int, ...] | None,
    device: str | None,
    sarif: Path | None,
    html: Path | None,
    folders: bool,
    as_json: bool | None,
) -> None:
    """Find what is wrong with checkpoints.

    The rules look at headers, then at values, then at what the config claims of them. A checkpoint in which
    nothing is found contradicts neither itself nor its config; it can still hold other weights than were
    meant, which only --against can find.

    It reads files piece by piece, so that a checkpoint may be larger than the memory. Threads share the
    layers, as many as QLOAD_NUM_THREADS says; under torchrun processes and hosts share them too, and the
    first process prints the one report. Files of a model of the hub are fetched into its cache first.

    With --logits a model has to fit into the memory of its device, and of each layer the dequantized weight.
    """
    from qload import native
    from qload.verify.prompt import Prompt
    from qload.verify.report import refused_path

    native.check()
    if not logits and (prompt_ids is not None or device is not None):
        raise click.UsageError("--prompt-ids and --device are options of --logits")
    prompt = Prompt(prompt_ids, device or "cpu") if logits else None
    places = tuple(folders_of(paths)) if folders else paths
    several = len(paths) > 1
    if several and html is not None:
        raise click.UsageError("--html is a page of one PATH")
    codes, reports = [], []
    with ranks() as group:
        first = group is None or group.rank() == 0
        with opened(against, whole=True, quiet=not first) if against else nullcontext() as reference:
            for path in places:
                with (
                    opened(path, whole=True, quiet=not first) as place,
                    progress_bar(seen=first) as progress,
                ):
                    tell = named(progress, str(path)) if several else progress
                    report = refused_path(place)
                    if report is None:
                        from qload.verify import verify as run  # imports torch

                        report = run(
                            place,
                            against=reference,
                            tp=tp,
                            tier=tier,
                            logits=prompt,
                            error_maps=html is not None,
                            progress=tell,
                            process_group=group,
                        )
                    if first and html is not None:
                        from qload.errors.writing import written_to
                        from qload.pictures import layer_pictures, report_page

                        pictures = layer_pictures(place, report.error_maps, progress=tell)
                        with written_to(html):
                            html.write_text(report_page(report, pictures), encoding="utf-8")
                if first:
                    reports.append(replace(report, layers=()))
                    codes.append(_told(report, as_json, sarif, several))
    if first and sarif is not None:
        write(reports, sarif)
    if first and several:
        summarize(several_lines(reports), as_json)
    ctx.exit(worst_code(codes) if first else 0)  # only the first process exits with the verdict


def _told(report: "Report", as_json: bool | None, sarif: Path | None, several: bool) -> int:
    """The exit code of a report, which is printed unless SARIF alone is asked for."""
    if sarif == STDOUT:
        if not several:
            summarize(report_lines(report), as_json)
        return report.exit_code
    return emit(report, as_json, _tables, report_lines, one_of_several=several)


def _tables(report: "Report") -> "Iterator[RenderableType]":
    from qload.cli.tables import findings, verdict

    yield verdict(report)
    yield from findings(report)
