"""The verbs inspect, verify and diff: examine and compare checkpoints."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.checkpoint_paths import checkpoint_folders, open_path, open_with_progress
from qload.cli.options import (
    STDOUT,
    CheckpointPath,
    OutputFile,
    all_option,
    html_option,
    image_option,
    parse_token_ids,
    paths_argument,
    report_options,
    world_sizes_option,
)
from qload.cli.output import exit_other_ranks, is_first_rank, print_report, torchrun_group, write_file
from qload.cli.progress import prefix_stages, progress_bar
from qload.cli.sarif import write_sarif
from qload.cli.text import layer_lines, outcome_counts, print_summary, report_lines, verdict_lines
from qload.errors.reporting import worst_code

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.diff import CheckpointDiff
    from qload.hub import HubId
    from qload.verify import Report
    from qload.verify.rules import Tier

INSPECT_EPILOG = """\b
Examples:
  qload inspect ./Llama-3-8B-GPTQ
  qload inspect ./Llama-3-8B-GPTQ --all
  qload inspect ./Llama-3-8B-GPTQ/model-00001-of-00004.safetensors
  qload inspect org/Llama-3-8B-GPTQ@main
  qload inspect ./Llama-3-8B-GPTQ --json | jq '.layers[0]'
  qload inspect ./models/* --json | jq -r '[.path, .verdict] | @tsv'

Several paths give a report each, in JSON Lines: one object per line.

Exit codes: 0 readable and in order, 1 findings or unreadable, 2 the command is wrong, 3 a bug of qload, 4 the
format is unsupported or some tensors are not read. For several paths it is the first of 2, 3, 1, 4, 0 that
occurs."""
VERIFY_EPILOG = """\b
Examples:
  qload verify ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 1,2,4
  qload verify ./Llama-3-8B-GPTQ --tier headers
  qload verify ./Llama-3-8B-GPTQ --against ./Llama-3-8B
  qload verify ./Llama-3-8B-EAGLE3 --target ./Llama-3-8B
  qload verify ./Llama-3-8B-GPTQ --logits --device cuda
  qload verify ./Llama-3-8B-GPTQ --logits --prompt-ids 128000,9906 --against ./Llama-3-8B
  qload verify org/Llama-3-8B-GPTQ@main
  qload verify ./Llama-3-8B-GPTQ --json | jq -r '.findings[].message'
  qload verify ./models/* --json | jq -r '[.path, .verdict] | @tsv'
  qload verify ./models/* --sarif findings.sarif
  torchrun --nproc-per-node 8 -m qload verify ./DeepSeek-V3

Several paths give a report each, in JSON Lines: one object per line. The page of a rule,
by `nox -s docs` or in the HTML report, explains it.

Exit codes: 0 no findings, 1 findings or unreadable, 2 the command is wrong, 3 a bug of qload, 4 the format is
unsupported or some tensors are not read. For several paths it is the first of 2, 3, 1, 4, 0 that occurs."""
DIFF_EPILOG = """\b
Examples:
  qload diff ./Llama-3-8B-GPTQ ./Llama-3-8B-AWQ
  qload diff ./shards-of-4GB ./shards-of-10GB --json | jq .counts
  torchrun --nproc-per-node 8 -m qload diff ./DeepSeek-V3 ./DeepSeek-V3-BF16

Exit codes: 0 both mean the same, 1 they differ or one is unreadable, 2 the command is wrong, 3 a bug of
qload, 4 the format of one is unsupported, or some of its tensors are not read."""
DIFF_OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different",
    "shape": "of other sizes",
    "missing": "in one of both only",
    "refused": "damaged in one of both",
    "unread": "not read",
}


@click.command(epilog=INSPECT_EPILOG)
@paths_argument
@all_option
@report_options
def inspect(ctx: click.Context, paths: "tuple[Path | HubId, ...]", every: bool, as_json: bool | None) -> None:
    """Show the layers of checkpoints.

    For each layer of the checkpoint at each PATH: format, bits, group size, symmetry, act order, shape
    (outputs, inputs), dtype and bytes, and each claim of the config that differs.

    Only headers and small tensors are read: the time depends on the number of tensors, hardly on their size.
    `qload verify` reads the rest.
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
                from qload.verify import inspect as run

                report = run(place)
        codes.append(print_report(report, as_json, tables, report_lines, one_of_several=several))
        reports.append(replace(report, layers=()))
    if several:
        print_summary(verdict_lines(reports), as_json)
    ctx.exit(worst_code(codes))


@click.command(epilog=VERIFY_EPILOG)
@paths_argument
@click.option(
    "--against",
    type=CheckpointPath(),
    metavar="DIR",
    help="Compare each layer with the same layer of another checkpoint of this model.",
)
@click.option(
    "--target",
    "target_model",
    type=CheckpointPath(),
    metavar="DIR",
    help="Also check that a draft model (EAGLE, MTP, Medusa, ...) fits this target model.",
)
@world_sizes_option("Also check that each layer can be sharded among N ranks, for each N.")
@click.option(
    "--tier",
    type=click.Choice(["headers", "values", "meaning"]),
    default="meaning",
    show_default=True,
    help="The last tier of rules to check; headers reads no weights.",
)
@click.option(
    "--logits",
    is_flag=True,
    help="Run the model with kernels and with dequantized weights, and compare each layer and the logits.",
)
@click.option(
    "--prompt-ids",
    callback=parse_token_ids,
    metavar="ID[,ID...]",
    help="Prompt of --logits. Default: 24 random token ids, always the same.",
)
@image_option("An image of the prompt of --logits, for a model with vision. Default: random pixels.")
@click.option("--device", metavar="DEVICE", help="Device of --logits: cpu or cuda.  [default: cpu]")
@click.option(
    "--sarif",
    type=OutputFile(allow_dash=True),
    metavar="FILE",
    help="Also write the findings to FILE, as SARIF 2.1.0 for code scanning; -: print SARIF alone.",
)
@html_option("the report of a single PATH")
@click.option(
    "--folders",
    is_flag=True,
    help="Verify the directory of each PATH once, and skip directories without safetensors: "
    "for tools that pass the names of changed files.",
)
@report_options
def verify(
    ctx: click.Context,
    paths: "tuple[Path | HubId, ...]",
    against: "Path | HubId | None",
    target_model: "Path | HubId | None",
    tp: tuple[int, ...] | None,
    tier: "Tier",
    logits: bool,
    prompt_ids: tuple[int, ...] | None,
    images: tuple[Path, ...],
    device: str | None,
    sarif: Path | None,
    html: Path | None,
    folders: bool,
    as_json: bool | None,
) -> None:
    """Find faults of checkpoints.

    The rules check headers, then values, then the claims of the config about them. A checkpoint without
    findings contradicts neither itself nor its config. Its weights can still be the wrong ones: only
    --against finds that.

    Files are read in blocks, so a checkpoint may be larger than the memory. QLOAD_NUM_THREADS threads share
    the layers; so do the processes of torchrun, on one host or several, and the first process prints the
    report. Files of a model of the hub are fetched into its cache first.

    With --logits the model, and the dequantized weight of one layer, must fit into the memory of the device.
    """
    from qload import native
    from qload.verify.report import Prompt, refused_path

    native.check()
    if not logits and (prompt_ids is not None or images or device is not None):
        raise click.UsageError("--prompt-ids, --image and --device are options of --logits")
    prompt = Prompt(prompt_ids, device or "cpu", images) if logits else None
    several = len(paths) > 1
    if several and html is not None:
        raise click.UsageError("--html is a page of one PATH")
    codes, reports = [], []
    with torchrun_group() as group:
        first = is_first_rank(group)
        with (
            open_path(against, whole=True, quiet=not first) if against else nullcontext() as reference,
            open_path(target_model, quiet=not first) if target_model else nullcontext() as target,
        ):
            for path in checkpoint_folders(paths) if folders else paths:
                with open_with_progress(path, first) as (place, bar):
                    progress = prefix_stages(bar, str(path)) if several else bar
                    report = refused_path(place)
                    if report is None:
                        from qload.verify import verify as run  # imports torch

                        report = run(
                            place,
                            against=reference,
                            target_model=target,
                            tp=tp,
                            tier=tier,
                            logits=prompt,
                            error_maps=html is not None,
                            progress=progress,
                            process_group=group,
                        )
                    if first and html is not None:
                        from qload.pictures import layer_pictures, report_page

                        pictures = layer_pictures(place, report.error_maps, progress=progress)
                        write_file(html, report_page(report, pictures))
                if first:
                    reports.append(replace(report, layers=()))
                    codes.append(_print_verify_report(report, as_json, sarif, several))
    if first and sarif is not None:
        write_sarif(reports, sarif)
    if first and several:
        print_summary(verdict_lines(reports), as_json)
    ctx.exit(worst_code(codes))  # 0 on all other ranks


def _print_verify_report(report: "Report", as_json: bool | None, sarif: Path | None, several: bool) -> int:
    """Print a report, unless standard output is for SARIF, and return its exit code."""
    if sarif == STDOUT:
        if not several:
            print_summary(report_lines(report), as_json)
        return report.exit_code
    return print_report(report, as_json, _verify_tables, report_lines, one_of_several=several)


def _verify_tables(report: "Report") -> "Iterator[RenderableType]":
    from qload.cli.tables import finding_tables, verdict_text

    yield verdict_text(report)
    yield from finding_tables(report)


@click.command(epilog=DIFF_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="A")
@click.argument("other", type=CheckpointPath(), metavar="B")
@report_options
def diff(ctx: click.Context, path: "Path | HubId", other: "Path | HubId", as_json: bool | None) -> None:
    """Show whether the checkpoints A and B mean the same weights.

    Formats, dtypes and shards may differ; so may the names of layers if the model type is known. Each layer
    is equal bit by bit once dequantized, equal after one rounding to the narrower float type, or different.
    For a different layer: the first difference, and the mistake that explains it.

    Weights are read in blocks, so a checkpoint may be larger than the memory.
    """
    from qload import native
    from qload.diff.report import refused_paths

    native.check()
    with torchrun_group() as group:
        first = is_first_rank(group)
        with (
            open_path(path, whole=True, quiet=not first) as left,
            open_path(other, whole=True, quiet=not first) as right,
            progress_bar(visible=first) as progress,
        ):
            report = refused_paths(left, right)
            if report is None:
                from qload.diff import diff as run  # imports torch

                report = run(left, right, progress=progress, process_group=group)
    ctx.exit(print_report(report, as_json, _diff_tables, _diff_summary) if first else 0)


def _diff_tables(report: "CheckpointDiff") -> "Iterator[RenderableType]":
    from qload.cli.tables import color_verdict, outcome_texts

    yield from outcome_texts((layer for layer in report.layers if not layer.same), DIFF_OUTCOMES)
    yield color_verdict(report.verdict, f"{report.verdict}  {outcome_counts(report, DIFF_OUTCOMES)}")


def _diff_summary(report: "CheckpointDiff") -> Iterator[str]:
    yield f"{report.verdict}  {outcome_counts(report, DIFF_OUTCOMES)}"
    layers = (layer for layer in report.layers if not layer.same)
    yield from layer_lines((DIFF_OUTCOMES[layer.outcome], layer.name, layer.detail) for layer in layers)
