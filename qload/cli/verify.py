"""The verbs inspect, verify and diff: judge what is stored in checkpoints."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.checkpoint_paths import checkpoint_folders, open_path
from qload.cli.options import (
    CheckpointPath,
    HtmlFile,
    folders_option,
    json_option,
    parse_world_sizes,
    paths_argument,
    verbose_option,
)
from qload.cli.output import exit_other_ranks, print_report, torchrun_group
from qload.cli.progress import prefix_stages, progress_bar
from qload.cli.run import parse_token_ids
from qload.cli.sarif import STDOUT, SarifFile, write_sarif
from qload.cli.text import layer_lines, outcome_counts, print_summary, report_lines, verdict_lines
from qload.errors.reporting import worst_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.diff import CheckpointDiff
    from qload.hub import HubId
    from qload.verify import Report
    from qload.verify.rules import Tier

VERIFY_EPILOG = """\b
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


@click.command(epilog=VERIFY_EPILOG)
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
    callback=parse_world_sizes,
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
    callback=parse_token_ids,
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
    type=HtmlFile(),
    metavar="FILE",
    help="Write the report of the one PATH to FILE too, as a page with tables to sort and filter.",
)
@folders_option
@json_option
@verbose_option
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
    places = tuple(checkpoint_folders(paths)) if folders else paths
    several = len(paths) > 1
    if several and html is not None:
        raise click.UsageError("--html is a page of one PATH")
    codes, reports = [], []
    with torchrun_group() as group:
        first = group is None or group.rank() == 0
        with open_path(against, whole=True, quiet=not first) if against else nullcontext() as reference:
            for path in places:
                with (
                    open_path(path, whole=True, quiet=not first) as place,
                    progress_bar(seen=first) as progress,
                ):
                    tell = prefix_stages(progress, str(path)) if several else progress
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
                        from qload.errors.exceptions import written_to
                        from qload.pictures import layer_pictures, report_page

                        pictures = layer_pictures(place, report.error_maps, progress=tell)
                        with written_to(html):
                            html.write_text(report_page(report, pictures), encoding="utf-8")
                if first:
                    reports.append(replace(report, layers=()))
                    codes.append(_print_verify_report(report, as_json, sarif, several))
    if first and sarif is not None:
        write_sarif(reports, sarif)
    if first and several:
        print_summary(verdict_lines(reports), as_json)
    ctx.exit(worst_code(codes) if first else 0)  # only the first process exits with the verdict


def _print_verify_report(report: "Report", as_json: bool | None, sarif: Path | None, several: bool) -> int:
    """The exit code of a report, which is printed unless SARIF alone is asked for."""
    if sarif == STDOUT:
        if not several:
            print_summary(report_lines(report), as_json)
        return report.exit_code
    return print_report(report, as_json, _verify_tables, report_lines, one_of_several=several)


def _verify_tables(report: "Report") -> "Iterator[RenderableType]":
    from qload.cli.tables import finding_tables, verdict_text

    yield verdict_text(report)
    yield from finding_tables(report)


INSPECT_EPILOG = """\b
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


@click.command(epilog=INSPECT_EPILOG)
@paths_argument
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@json_option
@verbose_option
@click.pass_context
def inspect(ctx: click.Context, paths: "tuple[Path | HubId, ...]", every: bool, as_json: bool | None) -> None:
    """Show the layers of checkpoints.

    For each layer of the checkpoint at each PATH: format, bits, group size, symmetry, act order, shape
    (outputs, inputs), dtype and bytes, and where its config claims something else.

    It reads headers and small tensors only, so that the size of the files matters little. The time grows
    in proportion to the number of tensors. `qload verify` reads the rest.
    """
    exit_other_ranks(ctx)

    def tables(report: "Report") -> "Iterator[RenderableType]":
        from qload.cli.layer_tables import contents_tables
        from qload.cli.tables import finding_tables, report_heading, verdict_text

        if len(paths) > 1:
            yield report_heading(report)
        yield from contents_tables(report, every=every)
        yield verdict_text(report)
        yield from finding_tables(report)

    from qload import native
    from qload.verify.report import refused_path

    native.check()
    codes, reports, several = [], [], len(paths) > 1
    for path in paths:
        with open_path(path) as place:
            report = refused_path(place)
            if report is None:
                from qload.verify import inspect as run  # imports torch

                report = run(place)
        codes.append(print_report(report, as_json, tables, report_lines, one_of_several=several))
        reports.append(replace(report, layers=()))
    if several:
        print_summary(verdict_lines(reports), as_json)
    ctx.exit(worst_code(codes))


DIFF_EPILOG = """\b
Examples:
  qload diff ./Llama-3-8B-GPTQ ./Llama-3-8B-AWQ
  qload diff ./shards-of-4GB ./shards-of-10GB --json | jq .counts
  torchrun --nproc-per-node 8 -m qload diff ./DeepSeek-V3 ./DeepSeek-V3-BF16

Exit codes: 0 both mean the same, 1 they do not or one cannot be read, 2 the command is wrong, 3 a bug of
qload, 4 the format, or some tensors, of one of both are not read."""
DIFF_OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different",
    "shape": "of other sizes",
    "missing": "in one of both only",
    "refused": "damaged in one of both",
    "unread": "not read",
}


@click.command(epilog=DIFF_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="A")
@click.argument("other", type=CheckpointPath(), metavar="B")
@json_option
@verbose_option
@click.pass_context
def diff(ctx: click.Context, path: "Path | HubId", other: "Path | HubId", as_json: bool | None) -> None:
    """Show whether the checkpoints A and B mean the same weights.

    Formats, dtypes and shards may differ, and spellings of names where the type of model is known. For each
    layer: equal bit by bit once dequantized, equal after one rounding to the narrower float type, or where it
    differs first, and the mistake that would explain it.

    Weights are read piece by piece, so that a checkpoint may be larger than the memory.
    """
    from qload import native
    from qload.diff.report import refused_paths

    native.check()
    with torchrun_group() as group:
        first = group is None or group.rank() == 0
        with (
            open_path(path, whole=True, quiet=not first) as one,
            open_path(other, whole=True, quiet=not first) as two,
            progress_bar(seen=first) as progress,
        ):
            found = refused_paths(one, two)
            if found is None:
                from qload.diff import diff as run  # imports torch

                found = run(one, two, progress=progress, process_group=group)
    ctx.exit(print_report(found, as_json, _diff_tables, _diff_summary) if first else 0)


def _diff_tables(found: "CheckpointDiff") -> "Iterator[RenderableType]":
    from rich.text import Text

    from qload.cli.tables import VERDICT_STYLES, outcome_texts

    yield from outcome_texts((layer for layer in found.layers if not layer.same), DIFF_OUTCOMES)
    yield Text(found.verdict, VERDICT_STYLES.get(found.verdict, "bold red")).append(
        f"  {outcome_counts(found, DIFF_OUTCOMES)}", "none"
    )


def _diff_summary(found: "CheckpointDiff") -> Iterator[str]:
    yield f"{found.verdict}  {outcome_counts(found, DIFF_OUTCOMES)}"
    layers = (layer for layer in found.layers if not layer.same)
    yield from layer_lines((DIFF_OUTCOMES[layer.outcome], layer.name, layer.detail) for layer in layers)
