"""qload convert: a checkpoint in another format, proven to mean the same."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, as_json, nonfinite, verbose
from qload.cli.output import emit
from qload.cli.progress import progress_bar
from qload.cli.ranks import ranks
from qload.cli.written import new_folder, shard_size, summary, tables

if TYPE_CHECKING:
    from qload.hub import HubId
    from qload.loader.finite_scales import Nonfinite

FLOATS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
FORMATS = ("gptq", "gptq_v2", "awq", "marlin_checkpoint", "marlin_24", "compressed-tensors", "fp8")
OLDER_NAMES = {"marlin": "marlin_checkpoint"}

EPILOG = """\b
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
OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different, so that nothing is left of what was written",
    "refused": "refused, so that nothing was written",
}


class TargetFormat(click.Choice):  # type: ignore[type-arg]
    """A format to write, also by its older name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The format's name of today; any other is a usage error."""
        return super().convert(OLDER_NAMES.get(value, value), param, ctx)


def rule_ids(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """The ids of rules; one that is no rule's is a usage error."""
    if value:
        from qload.verify.rule_pages import rule_pages

        for rule in value:
            if rule not in rule_pages():
                raise click.BadParameter(f"{rule[:80]!r} is no rule of docs/rules", ctx, param)
    return value


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--to",
    type=TargetFormat([*FORMATS, *FLOATS, *FLOATS.values()]),
    required=True,
    help="The format to write; of floats, layers are dequantized. marlin is the older name of "
    "marlin_checkpoint: Marlin's kernel order is no format of files.",
)
@new_folder
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
    callback=rule_ids,
    metavar="RULE",
    help="Convert although this rule of verify's header tier has errors; they become notes. "
    "May be given several times.",
)
@shard_size
@nonfinite
@as_json
@verbose
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
    with ranks() as group:
        first = group is None or group.rank() == 0
        with opened(path, whole=True, quiet=not first) as place, progress_bar(seen=first) as progress:
            refused, target = refused_path(place), FLOATS.get(to, to)
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
        emit(found, as_json, partial(tables, outcomes=OUTCOMES), partial(summary, outcomes=OUTCOMES))
        if first
        else 0
    )
