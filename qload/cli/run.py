"""The verb run: generate text with the model of a checkpoint."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from qload.cli.checkpoint_paths import open_path
from qload.cli.options import (
    CheckpointPath,
    image_option,
    nonfinite_option,
    parse_device,
    parse_token_ids,
    verbose_option,
)
from qload.cli.output import TORCHRUN_VARIABLE, UnsupportedCommandError, dumps, exit_quietly_unless_first
from qload.cli.text import escape
from qload.errors import ArgumentError, ConfigError, StorageError
from qload.storage import is_directory, is_taken, read_whole, snapshot

if TYPE_CHECKING:
    import torch

    from qload.engines.model_types import ModelSizes
    from qload.engines.transformers.generation import TransformersModel
    from qload.hub import HubId
    from qload.loader.source import Nonfinite
    from qload.models import Decoder, Engine, Sampler, TextConfig
    from qload.parallel import ProcessGroup

CACHE_PAGE_TOKENS = 16

EPILOG = """\b
Examples:
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --tokens 32
  qload run ./Llama-3-8B-GPTQ --prompt "Once upon a time" --device cuda
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000 --temperature 0.8 --top-p 0.95 --seed 7
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --tokens 0 --logits
  qload run ./idefics2-8b-awq --prompt "User:<image>What is this?" --image photo.jpg
  torchrun --nproc-per-node 2 -m qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --device cuda

The last line of standard output has the new token ids, comma separated. With --logits the logits after the
prompt precede it as a JSON array, and with --prompt the generated text. Under torchrun the processes share
the model, and the first one prints.

Exit codes: 0 the model ran, 1 the checkpoint is unreadable, 2 the command is wrong, or the model, the number
of ranks or the memory does not allow it, 3 a bug of qload, 4 the format is unsupported or some tensors are
not read."""


@dataclass(frozen=True)
class RunArguments:
    """Arguments of the command line."""

    place: Any  # a path, or a model of the hub as a folder
    ids: Sequence[int] | None
    text: str | None
    tokens: int
    device: str
    dtype: str | None
    sampler: "Sampler"
    logits: bool
    nonfinite: "Nonfinite"
    images: Sequence["Path"]


@dataclass(frozen=True)
class RunPlan:
    """Model and prompt of a run, known before any weight is read.

    `config`: of qload's own model, or sizes of a model of transformers.
    """

    config: "TextConfig | ModelSizes"
    ids: Sequence[int]
    tokenizer: "Tokenizer | None"
    dtype: "torch.dtype"
    device: "torch.device"
    pixels: "tuple[torch.Tensor, torch.Tensor] | None"  # of all images, with their mask


@dataclass(frozen=True)
class Generation:
    """Result of a run: new token ids, the logits after the prompt if requested, and times in seconds."""

    ids: Sequence[int]
    logits: Sequence[float] | None
    loading: float
    seconds: Sequence[float]  # from the start of the prompt to each id
    bytes: int


@click.command(epilog=EPILOG)
@click.argument("path", type=CheckpointPath(), metavar="PATH")
@click.option(
    "--prompt-ids", callback=parse_token_ids, metavar="ID[,ID...]", help="The prompt, as token ids."
)
@click.option(
    "--prompt",
    metavar="TEXT",
    help="The prompt, as text: needs the checkpoint's tokenizer.json, and qload-weights[text].",
)
@image_option("An image for <image> in the text, or for its tokens in the ids: needs a model with vision.")
@click.option(
    "--tokens", type=click.IntRange(0), default=16, show_default=True, help="Maximum number of new tokens."
)
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda: one GPU per process.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Dtype of activations and plain weights. Default: the dtype in the checkpoint's config.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the most likely token.")
@click.option("--top-k", type=int, help="Sample from the K most likely tokens.")
@click.option(
    "--top-p", type=float, default=1.0, show_default=True, help="Sample from the share P of the probability."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sampler.")
@click.option("--logits", is_flag=True, help="First print the logits after the prompt, as a JSON array.")
@nonfinite_option
@verbose_option
def run(
    path: "Path | HubId",
    prompt_ids: tuple[int, ...] | None,
    prompt: str | None,
    images: tuple[Path, ...],
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
    """Generate text with the model at PATH.

    All linear layers multiply with the stored weights, repacked for the kernels of a GPU. For a type of model
    without a decoder of qload, transformers runs the model with these layers, if it is installed. Standard
    error gets the speed of loading, of the prompt and of generation, in tokens and bytes per second.
    """
    if (prompt is None) == (prompt_ids is None):
        raise click.UsageError("the prompt is given by either --prompt-ids or --prompt, not by both")
    from qload import native
    from qload.storage.checkpoint_files import locate

    native.check()
    if isinstance(path, Path) and TORCHRUN_VARIABLE not in os.environ:
        locate(
            path
        )  # refuses a wrong path before torch is imported; under torchrun all ranks refuse it below

    from qload.models import Sampler
    from qload.parallel import joined_world

    parse_device(device)
    sampler = Sampler(temperature, top_k, top_p, seed)
    rank = 0
    with refuse_model_types(), exit_quietly_unless_first(lambda: rank), joined_world(device) as group:
        rank = group.rank()
        with open_path(path, whole=True, quiet=rank > 0) as place:
            arguments = RunArguments(
                place, prompt_ids, prompt, tokens, device, dtype, sampler, logits, nonfinite, images
            )
            plan = agree_on_plan(arguments, group)
            generation = _generate(arguments, plan, group)
        if rank == 0:
            _print_generation(plan, generation)


@contextmanager
def refuse_model_types() -> Iterator[None]:
    """Raise an error about the type of the model as an error of the command, with exit code 2."""
    from qload.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        if error.key.endswith("model_type"):
            raise UnsupportedCommandError(str(error)) from error
        raise


def agree_on_plan(arguments: RunArguments, group: "ProcessGroup") -> RunPlan:
    """Plan the run on every rank, or raise the error of one rank on all."""
    from qload.errors import QloadError
    from qload.parallel import agree

    plan, refusal = None, None
    try:
        plan = _plan_run(arguments, group)
    except QloadError as error:
        refusal = error
    agree(group, refusal)
    assert plan is not None  # `agree` raises a refusal of this rank
    return plan


def _plan_run(arguments: RunArguments, group: "ProcessGroup") -> RunPlan:
    import torch

    from qload.checkpoint import Checkpoint, check_all_read
    from qload.detect import read_model_config
    from qload.engines.model_types import sizes_of_any_type
    from qload.models import TextConfig, check_prompt
    from qload.models.decoder import unread_tensors_first
    from qload.models.images import check_image_tokens
    from qload.models.vision_config import vision_config
    from qload.storage import locate

    place = arguments.place
    if not locate(place).is_gguf and not read_model_config(place):
        with suppress(StorageError, ConfigError), Checkpoint.open(place) as checkpoint:
            check_all_read(checkpoint.weights)  # an unsupported format is raised first
        raise ArgumentError("path", "a checkpoint with a config.json", f"none in {place}")
    pixels, text = None, arguments.text
    with Checkpoint.open(place) as checkpoint:
        with unread_tensors_first(checkpoint.weights):
            config = sizes_of_any_type(place, checkpoint.model_config)
        if arguments.images:
            pixels, text = _read_images(arguments, checkpoint.model_config)
    tokenizer = None if text is None else Tokenizer(place)
    ids = tokenizer.encode(text or "") if tokenizer else arguments.ids or ()
    if pixels is not None:
        assert isinstance(config, TextConfig)  # a type with vision has a decoder of qload
        vision = vision_config(checkpoint.model_config, config.hidden, config.eps)
        check_image_tokens(ids, vision, len(pixels[0]))
    check_prompt(ids, arguments.tokens, config.vocab, config.positions)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else config.dtype or torch.float32
    device = torch.device(arguments.device)
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    plan = RunPlan(config, ids, tokenizer, dtype, device, pixels)
    _check_memory(arguments, plan, group)
    return plan


def _read_images(
    arguments: RunArguments, model_config: Mapping[str, Any]
) -> "tuple[tuple[torch.Tensor, torch.Tensor], str | None]":
    """Read the images, and the text with its image tokens."""
    from qload.models import text_config
    from qload.models.images import ImageProcessor
    from qload.models.vision_config import vision_config

    config = text_config(model_config)
    vectors = vision_config(model_config, config.hidden, config.eps).resampler.latents
    processor, text = ImageProcessor.of(arguments.place), arguments.text
    if text is not None:
        text = processor.expand(text, len(arguments.images), vectors)
    return processor.load(arguments.images), text


def _check_memory(arguments: RunArguments, plan: RunPlan, group: "ProcessGroup") -> None:
    """Raise NotEnoughMemoryError if the weights and the cache do not fit into the device."""
    from qload.models import TextConfig
    from qload.models.kv_cache import PagedCache, page_count
    from qload.models.memory import check_memory, free_bytes, stored_bytes
    from qload.storage import open_storage

    with open_storage(arguments.place) as storage:
        weights = stored_bytes(storage, plan.dtype) // group.size()
    cache = 0
    if isinstance(plan.config, TextConfig):
        pages = page_count(1, len(plan.ids) + arguments.tokens, CACHE_PAGE_TOKENS)
        sizes: dict[str, Any] = {"pages": pages, "page_size": CACHE_PAGE_TOKENS, "ranks": group.size()}
        cache = PagedCache.of(plan.config, **sizes, dtype=plan.dtype, device="meta").bytes
    free = free_bytes(plan.device)
    if free is not None and plan.device.type == "cpu":
        free //= group.size()  # the ranks of a machine share its memory
    check_memory(plan.device, weights + cache, free)


class EngineModel:
    """Model of qload in an engine, with the interface of `TransformersModel`.

    Parameters
    ----------
    engine
        The engine.
    embeddings
        Embeddings of the prompt, in place of those of its ids; or None.
    """

    def __init__(self, engine: "Engine", embeddings: "torch.Tensor | None" = None) -> None:
        self._engine, self._embeddings = engine, embeddings

    @property
    def bytes(self) -> int:
        """Bytes of the weights that a token needs."""
        from qload.models.memory import tensor_bytes

        model = self._engine.model
        return tensor_bytes(model) - tensor_bytes(model.embed_tokens)

    def logits(self, ids: Sequence[int]) -> "torch.Tensor":
        """Compute the logits (1, vocab) after a prompt `ids`."""
        return self._engine.prefill(ids, embeddings=self._embeddings)

    def generate(
        self, ids: Sequence[int], tokens: int, sampler: "Sampler", report: Callable[[int], None]
    ) -> None:
        """Generate ids after a prompt, and `report` each as soon as it is chosen."""
        for chosen in self._engine.stream([ids], tokens, sampler, [self._embeddings]):
            report(chosen[0])


def _generate(arguments: RunArguments, plan: RunPlan, group: "ProcessGroup") -> Generation:
    start = perf_counter()
    model = _load_model(arguments, plan, group)
    loading = perf_counter() - start
    logits = None
    if arguments.logits:
        (logits,) = model.logits(plan.ids).float().tolist()
    ids: list[int] = []
    seconds: list[float] = []
    start = perf_counter()

    def add(token: int) -> None:
        ids.append(token)
        seconds.append(perf_counter() - start)

    model.generate(plan.ids, arguments.tokens, arguments.sampler, add)
    return Generation(ids, logits, loading, seconds, model.bytes)


def _load_model(
    arguments: RunArguments, plan: RunPlan, group: "ProcessGroup"
) -> "EngineModel | TransformersModel":
    """Load the model of a plan and warm it up."""
    from qload.models import Engine, TextConfig

    options: dict[str, Any] = {"device": plan.device, "dtype": plan.dtype, "process_group": group}
    if not isinstance(plan.config, TextConfig):
        from qload.engines.transformers.generation import TransformersModel

        model = TransformersModel.load(arguments.place, plan.config, **options, nonfinite=arguments.nonfinite)
        model.logits(plan.ids)
        return model
    decoder, embeddings = _load_decoder(arguments, plan, options)
    engine = Engine(decoder, max_tokens=len(plan.ids) + arguments.tokens, page_size=CACHE_PAGE_TOKENS)
    engine.warm_up(len(plan.ids))
    return EngineModel(engine, embeddings)


def _load_decoder(
    arguments: RunArguments, plan: RunPlan, options: Mapping[str, Any]
) -> "tuple[Decoder, torch.Tensor | None]":
    """Load the text model, and the embeddings of a prompt with images."""
    import torch

    from qload.checkpoint import open_checkpoint
    from qload.detect import read_model_config
    from qload.models import load_model, load_vision_model

    with open_checkpoint(arguments.place, **options, target="auto", nonfinite=arguments.nonfinite) as weights:
        if plan.pixels is None:
            return load_model(weights), None
        model = load_vision_model(weights, read_model_config(arguments.place))
    with torch.no_grad():
        images = model.images(*(tensor.to(plan.device) for tensor in plan.pixels))
        return model.text, model.embed(torch.tensor([*plan.ids], device=plan.device), images)


def _print_generation(plan: RunPlan, generation: Generation) -> None:
    """Print the speed on standard error; logits, text and ids on standard output."""
    from qload.engines.model_types import ModelSizes

    if isinstance(plan.config, ModelSizes):
        click.echo(f"{plan.config.type}: {plan.config.program} runs it, with layers of qload", err=True)
    for line in speed_lines(len(plan.ids), generation):
        click.echo(line, err=True)
    if generation.logits is not None:
        click.echo(dumps(generation.logits, indent=None))
    if plan.tokenizer is not None:
        click.echo(escape(plan.tokenizer.decode(generation.ids), keep="\n\t", limit=1 << 20))
    click.echo(",".join(map(str, generation.ids)))


def speed_lines(prompt_tokens: int, generation: Generation) -> Iterator[str]:
    """Format a line each for loading, the prompt, and the tokens after the first."""
    yield f"loaded {generation.bytes / 1e9:.3f} GB of weights in {generation.loading:.1f} s, warm"
    if not generation.seconds:
        return
    first = generation.seconds[0]
    yield f"prompt: {prompt_tokens} tokens in {first:.3f} s, {prompt_tokens / first:.0f} tokens/s"
    steps, seconds = len(generation.seconds) - 1, generation.seconds[-1] - first
    if steps and seconds > 0:
        rate = steps / seconds
        bandwidth = rate * generation.bytes / 1e9
        yield f"steps: {steps} in {seconds:.3f} s, {rate:.1f} tokens/s, {bandwidth:.1f} GB/s of weights"


FILE = "tokenizer.json"
MAX_FILE_BYTES = 256 << 20  # ten times the largest published vocabulary


class Tokenizer:
    """Tokenizer of a checkpoint.

    Parameters
    ----------
    path
        The checkpoint. ArgumentError if it has no `tokenizer.json`, or if the library tokenizers is not
        installed; ConfigError if the file is not a tokenizer.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        try:
            library = import_module("tokenizers")
        except ImportError as error:
            expected = "ids (--prompt-ids), or tokenizers installed: pip install 'qload-weights[text]'"
            raise ArgumentError("prompt", expected, f"a text ({error!s:.80})") from error
        place = Path(snapshot(path))
        file = (place if is_directory(place) else place.parent) / FILE
        if not is_taken(file, FILE):
            raise ArgumentError("prompt", f"a checkpoint with {FILE}, or --prompt-ids", "none")
        text = read_whole(file, FILE, MAX_FILE_BYTES, "unreadable")
        try:
            self._tokenizer = library.Tokenizer.from_buffer(text)
        except Exception as error:  # the only exception class of the library
            raise ConfigError(FILE, "file", "a tokenizer", f"{error!s:.160}") from error

    def encode(self, text: str) -> list[int]:
        """Encode a text to ids, with the tokenizer's special tokens."""
        return [*self._tokenizer.encode(text).ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return str(self._tokenizer.decode([*ids]))
