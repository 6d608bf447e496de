"""The verbs convert and shard: write a checkpoint in another format, or one checkpoint per rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from qload.cli.checkpoint_paths import open_with_progress
from qload.cli.options import (
    CheckpointPath,
    experts_parallel_option,
    nonfinite_option,
    output_folder_option,
    report_options,
    shard_size_option,
)
from qload.cli.output import is_first_rank, print_report, torchrun_group
from qload.cli.text import finding_lines, format_count, layer_lines, note_lines, outcome_counts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.conversion import Conversion, ShardedCheckpoint
    from qload.hub import HubId
    from qload.loader.source import Nonfinite
    from qload.verify import Finding

ReportT = TypeVar("ReportT", "Conversion", "ShardedCheckpoint")
FLOAT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TARGET_FORMATS = (
    "gptq",
    "gptq_v2",
    "awq",
    "marlin_checkpoint",
    "marlin_24",
    "compressed-tensors",
    "quark",
    "fp8",
    "mxfp4",
    "mxfp4_mlx",
    "mxfp4_quark",
    "mxfp4_deepseek",
    "mxfp4_gpt_oss",
    "nvfp4",
    "nvfp4_mlx",
    "nvfp4_modelopt",
    "gguf",
)
FORMAT_ALIASES = {"marlin": "marlin_checkpoint"}

CONVERT_EPILOG = """\b
Examples:
  qload convert ./Llama-3-8B-GPTQ --to awq -o ./Llama-3-8B-AWQ
  qload convert ./Mixtral-8x7B-AWQ --to compressed-tensors -o ./Mixtral-8x7B-W4A16
  qload convert ./DeepSeek-V3 --to bf16 --round -o ./DeepSeek-V3-BF16
  qload convert ./Llama-3-8B-GPTQ --to marlin_checkpoint -o ./out --json | jq .findings
  torchrun --nproc-per-node 8 -m qload convert ./DeepSeek-V3 --to bf16 --round -o ./DeepSeek-V3-BF16

After an interruption, run the same command again: it continues.

Exit codes: 0 the checkpoint was written and means the same, 1 headers have errors, a layer was refused or
PATH is unreadable, 2 the command is wrong, or the disk is full, 3 a bug of qload, 4 the format is unsupported
or some tensors are not read. With 1 and 4 nothing was written."""
CONVERT_OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different: the output was deleted",
    "refused": "refused: nothing was written",
}
SHARD_EPILOG = """\b
Examples:
  qload shard ./Llama-3-8B-GPTQ --tp 4 -o ./Llama-3-8B-GPTQ-of-4
  qload shard ./Mixtral-8x7B-AWQ --tp 8 --ep 4 -o ./Mixtral-8x7B-AWQ-of-8
  qload shard ./Llama-3-8B-GPTQ --tp 3 -o ./out --json | jq '.layers[] | select(.outcome == "refused")'

After an interruption, run the same command again: it continues.

Exit codes: 0 each folder equals the share that its rank loads, 1 a layer was refused or PATH is unreadable, 2
the command is wrong, or the disk is full, 3 a bug of qload, 4 the format is unsupported or some tensors are
not read. With 1 and 4 nothing was written."""
SHARD_OUTCOMES = {
    "bits": "as ranks load them, bit by bit",
    "differs": "different: the output was deleted",
    "refused": "refused: nothing was written",
}


class TargetFormat(click.Choice):  # type: ignore[type-arg]
    """Choice of a target format, with its older names."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to the current name of the format; an unknown name is a usage error."""
        return super().convert(FORMAT_ALIASES.get(value, value), param, ctx)


def check_rule_ids(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Check the ids of rules; an unknown id is a usage error."""
    if value:
        from qload.errors.rules import rule_pages

        for rule in value:
            if rule not in rule_pages():
                raise click.BadParameter(f"{rule!r} is not the id of a rule", ctx, param)
    return value


@click.command(epilog=CONVERT_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--to",
    type=TargetFormat([*TARGET_FORMATS, *FLOAT_DTYPES, *FLOAT_DTYPES.values()]),
    help="Target format; a float type dequantizes the layers. marlin is the older name of marlin_checkpoint: "
    "the order of Marlin's kernel is not a file format.",
)
@click.option(
    "--names",
    type=click.Choice(["transformers"]),
    help="Rename tensors as transformers' class does, for DeepSeek V4; without --to their formats stay.",
)
@output_folder_option
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Copy the layers with these names unchanged, such as '*.q_proj'; repeatable.",
)
@click.option(
    "--round",
    "rounding",
    is_flag=True,
    help="Round values that fp16 or bf16 cannot represent, and -0 to 0 for gguf.",
)
@click.option(
    "--accept",
    multiple=True,
    callback=check_rule_ids,
    metavar="RULE",
    help="Convert despite errors of this rule of verify's header tier, and report them as notes; repeatable.",
)
@shard_size_option
@nonfinite_option
@report_options
def convert(
    ctx: click.Context,
    path: "Path | HubId",
    to: str | None,
    names: Literal["transformers"] | None,
    folder: Path,
    keep: tuple[str, ...],
    rounding: bool,
    accept: tuple[str, ...],
    shard_size: int,
    nonfinite: "Nonfinite",
    as_json: bool | None,
) -> None:
    """Write the checkpoint at PATH in another format.

    The header tier of `qload verify` runs first, and its errors end the command before anything is written.
    It reads no weights: run `qload verify` on PATH before, and on DIR after.

    Weights stay the same, bit for bit. A layer that the format cannot express refuses the conversion, with
    the reason, before anything is written. The written files are read back and compared layer by layer before
    DIR gets its name; qload-certificate.json in DIR records the result. Plain tensors, tokenizers and the
    like are copied, and the config is written in the style of the format's owner. Nothing is quantized.
    A GGUF file has no tokenizer.
    """
    from qload import conversion

    if to is None and names is None:
        raise click.MissingParameter(ctx=ctx, param_hint="'--to' / '--names'", param_type="option")
    target = None if to is None else FLOAT_DTYPES.get(to, to)

    def write(place: str | PathLike[str], **world: Any) -> "Conversion":
        return conversion.convert(  # imports torch
            place,
            folder,
            to=target,
            names=names,
            keep=keep,
            rounding=rounding,
            accept=accept,
            shard_size=shard_size,
            nonfinite=nonfinite,
            **world,
        )

    _write_checkpoint(
        ctx, path, partial(conversion.Conversion, to=target or ""), write, CONVERT_OUTCOMES, as_json
    )


@click.command(epilog=SHARD_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Number of ranks.",
)
@experts_parallel_option
@output_folder_option
@shard_size_option
@nonfinite_option
@report_options
def shard(
    ctx: click.Context,
    path: "Path | HubId",
    tp: int,
    ep: int | None,
    folder: Path,
    shard_size: int,
    nonfinite: "Nonfinite",
    as_json: bool | None,
) -> None:
    """Write the share of each rank as a checkpoint.

    Each rank gets a folder in the format of PATH, with the same names. Layers are cut as `qload plan` shows;
    a layer that cannot be cut refuses the command, with the reason, before anything is written. Each folder
    is then opened alone, and each layer compared with the share that its rank loads from PATH, before DIR
    gets its name; qload-certificate.json in DIR records the result. Configs, tokenizers and the like are
    copied.
    """

    from qload import conversion

    def write(place: str | PathLike[str], **world: Any) -> "ShardedCheckpoint":
        return conversion.shard(  # imports torch
            place, folder, tp=tp, ep=ep, shard_size=shard_size, nonfinite=nonfinite, **world
        )

    empty_report = partial(conversion.ShardedCheckpoint, tp=tp, ep=ep)
    _write_checkpoint(ctx, path, empty_report, write, SHARD_OUTCOMES, as_json)


def _write_checkpoint(
    ctx: click.Context,
    path: "Path | HubId",
    empty_report: "Callable[..., ReportT]",
    write: "Callable[..., ReportT]",
    outcomes: Mapping[str, str],
    as_json: bool | None,
) -> None:
    """Write a checkpoint on all ranks, print the report on the first rank, and exit with its code.

    `empty_report`: report of a path without a readable checkpoint. `write`: called with the opened path,
    `progress` and `process_group`.
    """
    from qload import native
    from qload.verify.report import reason_of, refused_path

    native.check()
    with torchrun_group() as group:
        first = is_first_rank(group)
        with open_with_progress(path, first) as (place, progress):
            refused = refused_path(place)
            if refused is None:
                report = write(place, progress=progress, process_group=group)
            else:
                report = empty_report(refused.path, **reason_of(refused.findings))
    if not first:
        ctx.exit(0)
    tables, summary = partial(_tables, outcomes=outcomes), partial(_summary, outcomes=outcomes)
    ctx.exit(print_report(report, as_json, tables, summary))


def _tables(
    report: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]
) -> "Iterator[RenderableType]":
    """Format the layers with problems, the notes, and the verdict."""
    from qload.cli.tables import FindingTable, color_verdict, note_texts, outcome_texts

    yield from outcome_texts((layer for layer in report.layers if not layer.well), {})
    if errors := _header_errors(report):
        yield FindingTable(errors)
    yield from note_texts(report.notes)
    yield color_verdict(report.verdict, f"{report.verdict}  {_outcome_text(report, outcomes)}")


def _summary(report: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> Iterator[str]:
    """Summarize the verdict, a line per cause of findings and of layers with problems, and the notes."""
    yield f"{report.verdict}  {_outcome_text(report, outcomes)}"
    yield from finding_lines(_header_errors(report))
    layers = (layer for layer in report.layers if not layer.well)
    yield from layer_lines((layer.outcome, layer.name, layer.detail) for layer in layers)
    yield from note_lines(report.notes)


def _header_errors(report: "Conversion | ShardedCheckpoint") -> "Sequence[Finding]":
    """Return the errors of the header tier, which `convert` runs and `shard` does not."""
    return getattr(report, "findings", ())


def _outcome_text(report: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> str:
    if errors := _header_errors(report):
        count = format_count(len(errors), "error")
        return (
            f"{count} in the header tier of verify: nothing was written; --accept RULE converts nevertheless"
        )
    return outcome_counts(report, outcomes)
