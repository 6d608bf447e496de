"""qload explain: which kernel multiplies each layer, and why not each other one."""

from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, as_json, numbers, verbose
from qload.cli.output import emit
from qload.cli.pages import PageFile
from qload.cli.ranks import by_first_alone
from qload.cli.summary import explanation_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from qload.hub import HubId
    from qload.plan import Explanation

EPILOG = """\b
Examples:
  qload explain ./Llama-3-8B-GPTQ
  qload explain ./Llama-3-8B-GPTQ --arch sm90 --tp 4 --dtype float16
  qload explain ./Llama-3-8B-GPTQ --arch sm80 --json | jq '.layers[0].choices'

Exit codes: 0 each layer can be loaded so, 1 one cannot or the checkpoint cannot be read, 2 the command is
wrong, 3 a bug of qload, 4 the format or some tensors are not read."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--arch",
    metavar="ARCH",
    help="sm80, sm90 and the like, or cpu; it need not be here. Default: this machine.",
)
@click.option(
    "--tp", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Number of ranks."
)
@click.option(
    "--dtype",
    type=click.Choice([*DTYPES, *DTYPES.values()]),
    help="Of the activations. Default: the dtype that config.json names, or bf16 where it names none.",
)
@click.option(
    "--tokens",
    callback=numbers("tokens"),
    default="1,64,1024",
    show_default=True,
    metavar="M[,M...]",
    help="Numbers of rows that are multiplied at once.",
)
@click.option(
    "--html",
    type=PageFile(),
    metavar="FILE",
    help="Write it to FILE too, as a page with a table to sort and filter.",
)
@click.option("--all", "every", is_flag=True, help="A line for each layer, also where several are alike.")
@as_json
@verbose
@click.pass_context
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
    """Show which kernel multiplies each layer, and why not each other one.

    No GPU is needed: layers are repacked, but for their codes, as loading for ARCH repacks them, and kernels
    are chosen by the table that calls choose by. A time is a prediction with its basis, or "not measured".
    """
    by_first_alone(ctx)
    from qload import native
    from qload.listing.report_base import make_report
    from qload.plan.report import Explanation
    from qload.storage.checkpoint_files import locate

    def explained(place: "str | PathLike[str]") -> Explanation:
        locate(place)  # refuses a wrong path before torch is imported
        import torch

        from qload.plan import explain as run

        activations = None if dtype is None else getattr(torch, DTYPES.get(dtype, dtype))
        return run(place, arch=arch, tp=tp, dtype=activations, tokens=tokens)

    native.check()
    with opened(path) as place:
        found = make_report(
            lambda: explained(place),
            lambda why: Explanation(str(place), unreadable=why),
            lambda why: Explanation(str(place), unsupported=why),
        )
    if html is not None:
        from qload.errors.writing import written_to
        from qload.pictures import explanation_page

        with written_to(html):
            html.write_text(explanation_page(found), encoding="utf-8")
    ctx.exit(emit(found, as_json, partial(_tables, every=every), explanation_lines))


def _tables(found: "Explanation", *, every: bool) -> "Iterator[RenderableType]":
    from qload.cli.explain_tables import tables

    return tables(found, every=every)
