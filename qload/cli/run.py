"""qload run: a model writes on after a prompt."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qload.cli.endings import Refusal
from qload.cli.hub import opened
from qload.cli.options import CheckpointPath, nonfinite, verbose
from qload.cli.output import dumps
from qload.cli.ranks import LAUNCHED
from qload.cli.text import safe

if TYPE_CHECKING:
    import torch

    from qload.hub import HubId
    from qload.loader.finite_scales import Nonfinite
    from qload.models import Decoder, Sampler, TextConfig
    from qload.models.tokenizer import Tokenizer
    from qload.parallel import ProcessGroup

PAGE_SIZE = 16  # tokens of a page of the cache

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
model, this world or this memory cannot give, 3 a bug of qload, 4 the format or some tensors are not read."""


@dataclass(frozen=True)
class RunArguments:
    """What the command line asks for."""

    place: Any  # a path, or a model of the hub as a folder
    ids: Sequence[int] | None
    text: str | None
    tokens: int
    device: str
    dtype: str | None
    sampler: "Sampler"
    logits: bool
    nonfinite: "Nonfinite" = "error"


@dataclass(frozen=True)
class RunPlan:
    """What will be run, known before any weight is read."""

    config: "TextConfig"
    ids: Sequence[int]
    tokenizer: "Tokenizer | None"
    dtype: "torch.dtype"
    device: "torch.device"


@dataclass(frozen=True)
class Written:
    """What came of it: the ids, the logits after the prompt if they were asked for, and how long it took."""

    ids: Sequence[int]
    logits: Sequence[float] | None
    loading: float
    seconds: Sequence[float]  # when each id was there, counted from the beginning of the prompt
    bytes: int


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
@nonfinite
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
    nonfinite: "Nonfinite",
) -> None:
    """Write on after a prompt with the model at PATH.

    All linears multiply by the weights as they are stored, or repacked for a GPU's kernels. Standard error
    says how fast the model was loaded, read the prompt, and wrote: tokens and bytes of weights a second.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("either --prompt-ids or --prompt has to say the prompt")
    from qload import native
    from qload.storage.locate import locate

    native.check()
    if isinstance(path, Path) and LAUNCHED not in os.environ:
        locate(path)  # refuses a wrong path before torch is imported; ranks refuse it together, below

    from qload.cli.devices import checked_device
    from qload.models import Sampler
    from qload.parallel import joined_world

    checked_device(device)
    sampler = Sampler(temperature, top_k, top_p, seed)
    with said_once() as ranks, joined_world(device) as group:
        ranks.append(group.rank())
        with opened(path, whole=True, quiet=group.rank() > 0) as place:
            asked = RunArguments(place, prompt_ids, prompt, tokens, device, dtype, sampler, logits, nonfinite)
            plan = planned(asked, group)
            written = _written(asked, plan, group)
        if group.rank() == 0:
            _tell(plan, written)


@contextmanager
def said_once() -> Iterator[list[int]]:
    """Inside, an error that all ranks raise is told by the first one; the others end quietly.

    To be told the rank, in the list. An error about the model's type means that the command is wrong.
    """
    from qload.errors import ConfigError, LostRankError, QloadError

    ranks: list[int] = []
    try:
        yield ranks
    except QloadError as error:
        if any(ranks) and not isinstance(error, LostRankError):
            raise click.exceptions.Exit(0) from error
        if isinstance(error, ConfigError) and error.key.endswith("model_type"):
            raise Refusal(str(error)) from error
        raise


def planned(asked: RunArguments, group: "ProcessGroup") -> RunPlan:
    """What to run, on every rank or on none."""
    from qload.errors import QloadError
    from qload.parallel import agree

    plan, refused = None, None
    try:
        plan = _planned(asked, group)
    except QloadError as error:
        refused = error
    agree(group, refused)
    assert plan is not None  # or this rank has refused
    return plan


def _planned(asked: RunArguments, group: "ProcessGroup") -> RunPlan:
    import torch

    from qload.detect import read_model_config
    from qload.errors import ArgumentError, ConfigError
    from qload.models import check_prompt
    from qload.models.decoder import checked_config
    from qload.models.tokenizer import Tokenizer

    values = read_model_config(asked.place)
    if not values:
        with suppress(ConfigError):
            checked_config(asked.place, values)  # an unsupported format is raised first
        raise ArgumentError("path", "a checkpoint with a config.json", f"none beside {asked.place}")
    config = checked_config(asked.place, values)
    tokenizer = None if asked.text is None else Tokenizer(asked.place)
    ids = tokenizer.encode(asked.text or "") if tokenizer else asked.ids or ()
    check_prompt(ids, asked.tokens, config.vocab, config.positions)
    dtype = getattr(torch, asked.dtype) if asked.dtype else config.dtype or torch.float32
    device = torch.device(asked.device)
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    plan = RunPlan(config, ids, tokenizer, dtype, device)
    _check_memory(asked, plan, group)
    return plan


def _check_memory(asked: RunArguments, plan: RunPlan, group: "ProcessGroup") -> None:
    """NotEnoughMemoryError where the weights and the cache need more than the device has."""
    from qload.models.kv_cache import PagedCache, page_count
    from qload.models.memory import check_memory, free_bytes, stored_bytes
    from qload.storage import SafetensorsStorage

    with SafetensorsStorage(asked.place) as storage:
        weights = stored_bytes(storage, plan.dtype) // group.size()
    pages = page_count(1, len(plan.ids) + asked.tokens, PAGE_SIZE)
    sizes: dict[str, Any] = {"pages": pages, "page_size": PAGE_SIZE, "ranks": group.size()}
    cache = PagedCache.of(plan.config, **sizes, dtype=plan.dtype, device="meta")
    free = free_bytes(plan.device)
    if free is not None and plan.device.type == "cpu":
        free //= group.size()  # the ranks of a machine have one memory
    check_memory(plan.device, weights + cache.bytes, free)


def _written(asked: RunArguments, plan: RunPlan, group: "ProcessGroup") -> Written:
    from qload.models import Engine
    from qload.models.memory import tensor_bytes

    start = perf_counter()
    model = _loaded(asked, plan, group)
    engine = Engine(model, max_tokens=len(plan.ids) + asked.tokens, page_size=PAGE_SIZE)
    engine.warm_up(len(plan.ids))
    loading = perf_counter() - start
    logits = engine.prefill(plan.ids)[0].float().tolist() if asked.logits else None
    start = perf_counter()
    ids, seconds = [], []
    for chosen in engine.stream([plan.ids], asked.tokens, asked.sampler):
        ids.append(chosen[0])
        seconds.append(perf_counter() - start)
    return Written(ids, logits, loading, seconds, tensor_bytes(model) - tensor_bytes(model.embed_tokens))


def _loaded(asked: RunArguments, plan: RunPlan, group: "ProcessGroup") -> "Decoder":
    from qload.models import load_model
    from qload.weights import open_checkpoint

    options: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype, "process_group": group}
    with open_checkpoint(asked.place, **options, target="auto", nonfinite=asked.nonfinite) as weights:
        return load_model(weights)


def _tell(plan: RunPlan, written: Written) -> None:
    """Speed to standard error; logits, text and ids to standard output."""
    for line in speed(len(plan.ids), written):
        click.echo(line, err=True)
    if written.logits is not None:
        click.echo(dumps(written.logits, indent=None))
    if plan.tokenizer is not None:
        click.echo(safe(plan.tokenizer.decode(written.ids), keep="\n\t", limit=1 << 20))
    click.echo(",".join(map(str, written.ids)))


def speed(prompt: int, written: Written) -> Iterator[str]:
    """A line each for loading, the prompt, and the tokens after the first."""
    yield f"loaded {written.bytes / 1e9:.3f} GB of weights in {written.loading:.1f} s, warm"
    if not written.seconds:
        return
    first = written.seconds[0]
    yield f"prompt: {prompt} tokens in {first:.3f} s, {prompt / first:.0f} tokens/s"
    steps, took = len(written.seconds) - 1, written.seconds[-1] - first
    if steps and took > 0:
        rate = steps / took
        read = rate * written.bytes / 1e9
        yield f"steps: {steps} in {took:.3f} s, {rate:.1f} tokens/s, {read:.1f} GB/s of weights"
