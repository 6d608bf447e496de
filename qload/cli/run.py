"""qload run: a model writes on after a prompt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, verbose
from qload.cli.output import dumps
from qload.cli.text import safe

if TYPE_CHECKING:
    import torch

    from qload.hub import HubId
    from qload.models import Decoder, Engine, Sampler, TextConfig
    from qload.models.tokenizer import Tokenizer
    from qload.parallel import ProcessGroup

R = TypeVar("R")

EPILOG = """\b
Examples:
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --tokens 32
  qload run ./Llama-3-8B-GPTQ --prompt "Once upon a time" --device cuda
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000 --temperature 0.8 --top-p 0.95 --seed 7
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --tokens 0 --logits
  torchrun --nproc-per-node 2 -m qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --device cuda

The last line of standard output is the new token ids, comma separated. Before it stand, with --logits, the
logits after the prompt as a JSON array, and of a --prompt the text that was written. Under torchrun the
processes share the model, and the first one prints.

Exit codes: 0 it was run, 1 the checkpoint cannot be read, 2 the command is wrong, or asks for what this
model, this world or this memory cannot give."""

PAGE = 16  # tokens of a page of the cache


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    place: Any
    ids: Sequence[int] | None
    text: str | None
    tokens: int
    device: str
    dtype: str | None
    sampler: "Sampler"
    logits: bool


@dataclass(frozen=True)
class Plan:
    """What will be run, known before any weight is read."""

    config: "TextConfig"
    ids: Sequence[int]
    tokenizer: "Tokenizer | None"
    dtype: "torch.dtype"
    device: "torch.device"


def token_ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """`1,2,3` as numbers; anything else is a usage error."""
    if value is None:
        return None
    numbers = [number.strip() for number in value.split(",")]
    if not all(number.isdecimal() and number.isascii() and len(number) < 10 for number in numbers):
        raise click.BadParameter(f"{value[:80]!r} is no list of token ids such as 1,2,3", ctx, param)
    return tuple(map(int, numbers))


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option("--prompt-ids", callback=token_ids, metavar="ID[,ID...]", help="The prompt, as token ids.")
@click.option(
    "--prompt",
    metavar="TEXT",
    help="The prompt as text: needs the checkpoint's tokenizer.json, and qload-weights[text].",
)
@click.option(
    "--tokens", type=click.IntRange(0), default=16, show_default=True, help="How many to write at most."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda: of each process its own.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of what is computed. Default: what the checkpoint's config says.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", type=int, help="Draw from so many of the likeliest alone.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from those of so much alone.")
@click.option("--seed", type=int, default=0, show_default=True, help="What tokens are drawn by.")
@click.option("--logits", is_flag=True, help="Print the logits after the prompt, a JSON array, first.")
@verbose
def run(
    path: "Path | HubId",
    prompt_ids: tuple[int, ...] | None,
    prompt: str | None,
    tokens: int,
    device: str,
    dtype: str | None,
    temperature: float,
    top_k: int | None,
    top_p: float,
    seed: int,
    logits: bool,
) -> None:
    """Write on after a prompt with the model at PATH.

    All linears multiply by the weights as they are stored, or repacked for a GPU's kernels. Standard error
    says how fast the model was loaded, read the prompt, and wrote: tokens and bytes of weights a second.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("either --prompt-ids or --prompt has to say the prompt")
    from qload import native
    from qload.models import Sampler
    from qload.parallel import joined_world

    native.check()
    sampler = Sampler(temperature, top_k, top_p, seed)
    with joined_world(device) as group:
        with opened(path, whole=True, quiet=group.rank() > 0) as place:
            asked = Asked(place, prompt_ids, prompt, tokens, device, dtype, sampler, logits)
            told = _run(asked, group)
        if group.rank() == 0:
            told()


def _run(asked: Asked, group: "ProcessGroup") -> Callable[[], None]:
    """What the command does on each rank, and what the first one then prints."""
    plan = _agreed(group, lambda: _planned(asked, group))
    model, seconds = _timed(lambda: _agreed(group, lambda: _loaded(asked, plan, group)))
    ...
