"""qload shard: what each rank would load of a checkpoint, as files."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, as_json, experts_parallel, nonfinite, verbose
from qload.cli.output import emit
from qload.cli.progress import progress_bar
from qload.cli.ranks import ranks
from qload.cli.written import new_folder, shard_size, summary, tables

if TYPE_CHECKING:
    from qload.hub import HubId
    from qload.loader.finite_scales import Nonfinite

EPILOG = """\b
Examples:
  qload shard ./Llama-3-8B-GPTQ --tp 4 -o ./Llama-3-8B-GPTQ-of-4
  qload shard ./Mixtral-8x7B-AWQ --tp 8 --ep 4 -o ./Mixtral-8x7B-AWQ-of-8
  qload shard ./Llama-3-8B-GPTQ --tp 3 -o ./out --json | jq '.layers[] | select(.outcome == "refused")'

The same command after an interruption goes on where it was.

Exit codes: 0 it was written and is what ranks load, 1 a layer was refused or it cannot be read, and nothing
was written, 2 the command is wrong, or the disk is full, 3 a bug of qload, 4 the format or some tensors are
not read, and nothing was written."""
OUTCOMES = {
    "bits": "as ranks load them, bit by bit",
    "differs": "different, so that nothing is left of what was written",
    "refused": "refused, so that nothing was written",
}


@click.command(epilog=EPILOG)
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
@experts_parallel
@new_folder
@shard_size
@nonfinite
@as_json
@verbose
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
    with ranks() as group:
        first = group is None or group.rank() == 0
        with opened(path, whole=True, quiet=not first) as place, progress_bar(seen=first) as progress:
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
        emit(found, as_json, partial(tables, outcomes=OUTCOMES), partial(summary, outcomes=OUTCOMES))
        if first
        else 0
    )
