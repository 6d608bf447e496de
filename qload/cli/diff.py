"""qload diff: whether two checkpoints mean the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, as_json, verbose
from qload.cli.output import emit
from qload.cli.progress import progress_bar
from qload.cli.ranks import ranks
from qload.cli.summary import counts, layer_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.diff import CheckpointDiff
    from qload.hub import HubId

EPILOG = """\b
Examples:
  qload diff ./Llama-3-8B-GPTQ ./Llama-3-8B-AWQ
  qload diff ./shards-of-4GB ./shards-of-10GB --json | jq .counts
  torchrun --nproc-per-node 8 -m qload diff ./DeepSeek-V3 ./DeepSeek-V3-BF16

Exit codes: 0 both mean the same, 1 they do not or one cannot be read, 2 the command is wrong, 3 a bug of
qload, 4 the format, or some tensors, of one of both are not read."""
OUTCOMES = {
    "bits": "equal, bit by bit",
    "rounded": "equal after one rounding",
    "differs": "different",
    "shape": "of other sizes",
    "missing": "in one of both only",
    "refused": "damaged in one of both",
    "unread": "not read",
}


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="A")
@click.argument("other", type=CheckpointPath(), metavar="B")
@as_json
@verbose
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
    with ranks() as group:
        first = group is None or group.rank() == 0
        with (
            opened(path, whole=True, quiet=not first) as one,
            opened(other, whole=True, quiet=not first) as two,
            progress_bar(seen=first) as progress,
        ):
            found = refused_paths(one, two)
            if found is None:
                from qload.diff import diff as run  # imports torch

                found = run(one, two, progress=progress, process_group=group)
    ctx.exit(emit(found, as_json, _tables, _summary) if first else 0)


def _tables(found: "CheckpointDiff") -> "Iterator[RenderableType]":
    from rich.text import Text

    from qload.cli.tables import STYLE, outcomes

    yield from outcomes((layer for layer in found.layers if not layer.same), OUTCOMES)
    yield Text(found.verdict, STYLE.get(found.verdict, "bold red")).append(
        f"  {counts(found, OUTCOMES)}", "none"
    )


def _summary(found: "CheckpointDiff") -> Iterator[str]:
    yield f"{found.verdict}  {counts(found, OUTCOMES)}"
    layers = (layer for layer in found.layers if not layer.same)
    yield from layer_lines((OUTCOMES[layer.outcome], layer.name, layer.detail) for layer in layers)
