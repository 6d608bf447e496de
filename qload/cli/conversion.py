"""The verbs convert and shard: write a checkpoint in another format, or one checkpoint per rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import (
    CheckpointPath,
    experts_parallel_option,
    json_option,
    nonfinite_option,
    output_folder_option,
    verbose_option,
)
from qload.cli.output import print_report, torchrun_group
from qload.cli.progress import progress_bar
from qload.cli.text import finding_lines, format_count, layer_lines, note_lines, outcome_counts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.conversion import Conversion, ShardedCheckpoint
    from qload.hub import HubId
    from qload.loader.finite_scales import Nonfinite
    from qload.verify import Finding

F = TypeVar("F", bound=Callable[..., Any])
GIGABYTE = 1_000_000_000
MAX_FILE_BYTES = 2**63 - 1  # bytes: places in a file are signed numbers of 64 bits
new_folder_option = output_folder_option("Where to; not there yet, or empty.")


def shard_size_option(function: F) -> F:
    """--shard-size, asked for in gigabytes and told in bytes, at least 1."""
    return click.option(
        "--shard-size",
        type=click.FloatRange(min=0, min_open=True),
        default=5,
        show_default=True,
        metavar="GB",
        callback=_parse_gigabytes,
        help="Of how many gigabytes a file is at most.",
    )(function)


def _parse_gigabytes(ctx: click.Context, param: click.Parameter, value: float) -> int:
    size = value * GIGABYTE
    if not size <= MAX_FILE_BYTES:
        most = MAX_FILE_BYTES // GIGABYTE
        raise click.BadParameter(
            f"{value} GB is the size of no file, which has at most {most} GB", ctx, param
        )
    return max(1, int(size))


def conversion_tables(
    found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]
) -> "Iterator[RenderableType]":
    """The layers that are not well, the notes, and the verdict; `outcomes` in words."""
    from rich.text import Text

    from qload.cli import tables as shared

    yield from shared.outcome_texts((layer for layer in found.layers if not layer.well), {})
    findings = header_errors(found)
    if findings:
        yield shared.FindingTable(findings)
    yield from shared.note_texts(found.notes)
    yield Text(found.verdict, shared.VERDICT_STYLES.get(found.verdict, "bold red")).append(
        f"  {_outcome_text(found, outcomes)}", "none"
    )


def conversion_summary(found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> Iterator[str]:
    """The verdict, and a line for each reason why a checkpoint or a layer is not well."""
    yield f"{found.verdict}  {_outcome_text(found, outcomes)}"
    yield from finding_lines(header_errors(found))
    yield from layer_lines(
        (layer.outcome, layer.name, layer.detail) for layer in found.layers if not layer.well
    )
    yield from note_lines(found.notes)


def header_errors(found: "Conversion | ShardedCheckpoint") -> "Sequence[Finding]":
    """Errors of headers, which `convert` looks for."""
    return getattr(found, "findings", ())


def _outcome_text(found: "Conversion | ShardedCheckpoint", outcomes: Mapping[str, str]) -> str:
    errors = header_errors(found)
    if errors:
        refused = (
            f"{format_count(len(errors), 'error')} in the header tier of verify, so that nothing was written"
        )
        return f"{refused}; --accept RULE converts all the same"
    return outcome_counts(found, outcomes)


FLOAT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
TARGET_FORMATS = ("gptq", "gptq_v2", "awq", "marlin_checkpoint", "marlin_24", "compressed-tensors", "fp8")
FORMAT_ALIASES = {"marlin": "marlin_checkpoint"}

CONVERT_EPILOG = """\b
Examples:
  qload convert ./Llama-3-8B-GPTQ --to awq -o ./Llama-3-8B-AWQ
  qload convert ./Mixtral-8x7B-AWQ --to compressed-tensors -o ./Mixtral-8x7B-W4A16
  qload convert ./DeepSeek-V3 --to bf16 --round -o ./DeepSeek-V3-BF16
  qload convert ./Llama-3-8B-GPTQ --to marlin_checkpoint -o ./out --json | jq .findings
  torchrun --nproc-per-node 8 -m qload convert ./DeepSeek-V3 --to bf16 --round -o ./DeepSeek-V3-BF16

The same command after an interruption goes on where it was.

Exit codes: 0 it was written and means the same, 1 headers have errors, a layer was refused or it cannot be
read, and nothing was written, 2 the command is wrong, or the disk is full, 3 a bug of qload, 4 the format or
some tensors are not read, and nothing was written."""
CONVERT_OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different, so that nothing is left of what was written",
    "refused": "refused, so that nothing was written",
}


class TargetFormat(click.Choice):  # type: ignore[type-arg]
    """A format to write, also by its older name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The format's name of today; any other is a usage error."""
        return super().convert(FORMAT_ALIASES.get(value, value), param, ctx)


def check_rule_ids(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """The ids of rules; one that is no rule's is a usage error."""
    if value:
        from qload.verify.rule_pages import rule_pages

        for rule in value:
            if rule not in rule_pages():
                raise click.BadParameter(f"{rule[:80]!r} is no rule of docs/rules", ctx, param)
    return value


@click.command(epilog=CONVERT_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--to",
    type=TargetFormat([*TARGET_FORMATS, *FLOAT_DTYPES, *FLOAT_DTYPES.values()]),
    required=True,
    help="The format to write; of floats, layers are dequantized. marlin is the older name of "
    "marlin_checkpoint: Marlin's kernel order is no format of files.",
)
@new_folder_option
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Leave layers of these names as they are, such as '*.q_proj'; may be given several times.",
)
@click.option("--round", "rounding", is_flag=True, help="Round to fp16 or bf16 what is no such number.")
@click.option(
    "--accept",
    multiple=True,
    callback=check_rule_ids,
    metavar="RULE",
    help="Convert although this rule of verify's header tier has errors; they become notes. "
    "May be given several times.",
)
@shard_size_option
@nonfinite_option
@json_option
@verbose_option
@click.pass_context
def convert(
    ctx: click.Context,
    path: "Path | HubId",
    to: str,
    folder: Path,
    keep: tuple[str, ...],
    rounding: bool,
    accept: tuple[str, ...],
    shard_size: int,
    nonfinite: "Nonfinite",
    as_json: bool | None,
) -> None:
    """Write the checkpoint at PATH in another format.

    The header tier of `qload verify` runs first, and its errors end the command before anything is written;
    it reads no weight, so run `qload verify` on PATH before and on DIR after.

    The same weights, bit for bit: each layer is asked before a byte is written, and one that the format
    cannot say refuses all, with the reason. What was written is read back and compared, layer by layer,
    before DIR has its name; qload-certificate.json there says so. Tensors of no quantized layer, tokenizers
    and the like are copied, and the config is written as the format's owner writes it. Nothing is quantized.
    """
    from qload import native
    from qload.conversion.report import Conversion
    from qload.verify.report import reason_of, refused_path

    native.check()
    with torchrun_group() as group:
        first = group is None or group.rank() == 0
        with open_path(path, whole=True, quiet=not first) as place, progress_bar(seen=first) as progress:
            refused, target = refused_path(place), FLOAT_DTYPES.get(to, to)
            if refused is not None:
                found = Conversion(refused.path, to=target, **reason_of(refused.findings))
            else:
                from qload.conversion import convert as run  # imports torch

                found = run(
                    place,
                    folder,
                    to=target,
                    keep=keep,
                    rounding=rounding,
                    accept=accept,
                    shard_size=shard_size,
                    nonfinite=nonfinite,
                    progress=progress,
                    process_group=group,
                )
    ctx.exit(
        print_report(
            found,
            as_json,
            partial(conversion_tables, outcomes=CONVERT_OUTCOMES),
            partial(conversion_summary, outcomes=CONVERT_OUTCOMES),
        )
        if first
        else 0
    )


SHARD_EPILOG = """\b
Examples:
  qload shard ./Llama-3-8B-GPTQ --tp 4 -o ./Llama-3-8B-GPTQ-of-4
  qload shard ./Mixtral-8x7B-AWQ --tp 8 --ep 4 -o ./Mixtral-8x7B-AWQ-of-8
  qload shard ./Llama-3-8B-GPTQ --tp 3 -o ./out --json | jq '.layers[] | select(.outcome == "refused")'

The same command after an interruption goes on where it was.

Exit codes: 0 it was written and is what ranks load, 1 a layer was refused or it cannot be read, and nothing
was written, 2 the command is wrong, or the disk is full, 3 a bug of qload, 4 the format or some tensors are
not read, and nothing was written."""
SHARD_OUTCOMES = {
    "bits": "as ranks load them, bit by bit",
    "differs": "different, so that nothing is left of what was written",
    "refused": "refused, so that nothing was written",
}


@click.command(epilog=SHARD_EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--tp",
    "--tensor-parallel-size",
    "tp",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="The number of ranks.",
)
@experts_parallel_option
@new_folder_option
@shard_size_option
@nonfinite_option
@json_option
@verbose_option
@click.pass_context
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
    """Write what each of N ranks would load of the checkpoint at PATH.

    Into a folder for each rank, in the format and under the names that it has: layers are cut as `qload plan`
    says, and one that cannot be refuses all, with the reason, before a byte is written. Each folder is then
    opened by itself, and each layer compared with what its rank loads of the whole, before DIR has its name;
    qload-certificate.json there says so. Configs, tokenizers and the like are copied into each folder.
    """
    from qload import native
    from qload.conversion.report import ShardedCheckpoint
    from qload.verify.report import reason_of, refused_path

    native.check()
    with torchrun_group() as group:
        first = group is None or group.rank() == 0
        with open_path(path, whole=True, quiet=not first) as place, progress_bar(seen=first) as progress:
            refused = refused_path(place)
            if refused is not None:
                found = ShardedCheckpoint(refused.path, tp=tp, ep=ep, **reason_of(refused.findings))
            else:
                from qload.conversion import shard as run  # imports torch

                found = run(
                    place,
                    folder,
                    tp=tp,
                    ep=ep,
                    shard_size=shard_size,
                    nonfinite=nonfinite,
                    progress=progress,
                    process_group=group,
                )
    ctx.exit(
        print_report(
            found,
            as_json,
            partial(conversion_tables, outcomes=SHARD_OUTCOMES),
            partial(conversion_summary, outcomes=SHARD_OUTCOMES),
        )
        if first
        else 0
    )
