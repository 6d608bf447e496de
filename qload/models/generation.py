"""Text generation: prefill and decode of a model with a paged cache, CUDA graphs, and sampling.

    engine = Engine(model, max_tokens=256, max_sequences=4)
    engine.warm_up(prompt_tokens=128)             # no later step allocates memory
    ids = engine.generate([1, 2, 3], tokens=16)

Sampling of a token from logits:

    p = softmax(logits / temperature)
    top-k: keep the k likeliest tokens; top-p: of these the smallest set with the share `top_p` of probability
    token: the first with a cumulative probability above u times the sum, for u of [0, 1)

The numbers u depend on the seed and the sequence alone: a sequence has the same numbers in any batch, on the
CPU and on a GPU, and sums are float64.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat, takewhile
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.errors import ArgumentError, check_fields, checked
from qload.kernels.scratch import warm_up
from qload.models.config import TextConfig
from qload.models.decoder import Decoder
from qload.models.kv_cache import PADDING_PAGE, PagedCache, PageTable, Step
from qload.parallel import ALONE, Collectives, collectives_of, register_capture

log: logging.Logger = logging.getLogger("qload")

NOT_FINITE = -1  # the id chosen from logits whose largest is not finite
# torch allocates tensors up to this size from separate blocks; a step has fewer than this many alive at once.
SMALL_TENSOR_BYTES, MAX_SMALL_TENSORS = 1 << 20, 32
MIN_GRAPH_TOKENS = 64  # of a prompt
MAX_GRAPH_TOKENS = 1024  # with more, the device takes longer than the host
GRAPH_WARM_UPS = 2  # runs before a capture, for allocations that only a first call makes


def prompt_sizes(config: TextConfig, longest: int) -> list[int]:
    """Tokens of the prompts with a graph, in ascending order; each is at most 1.5 times the one before.

    `longest`: tokens of the longest prompt. Models with experts have none, as the host chooses their kernels.
    """
    if config.sparse_layers:
        return []
    sizes = {longest} if longest >= MIN_GRAPH_TOKENS else set()
    for size in takewhile(longest.__gt__, (MIN_GRAPH_TOKENS << n for n in count())):
        sizes |= {size, size * 3 // 2}
    return sorted(size for size in sizes if size <= min(longest, MAX_GRAPH_TOKENS))


StepCall = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Sampler:
    """Sampling parameters; by default greedy. ArgumentError for a value out of range.

    Attributes
    ----------
    temperature
        Divisor of the logits, at least 0; 0 is greedy and draws no number.
    top_k
        Number of likeliest tokens kept, at least 1; None keeps all.
    top_p
        Share of the probability of those that is kept, 0 < top_p <= 1.
    seed
        Seed of the random numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", "a finite number of at least 0", str(self.temperature))
        if self.top_k is not None and self.top_k < 1:
            raise ArgumentError("top_k", "at least 1", str(self.top_k))
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", "more than 0, at most 1", str(self.top_p))

    def numbers(self, sequence: int) -> Iterator[float]:
        """Yield the random numbers of [0, 1) for the tokens of sequence number `sequence`."""
        if not self.temperature:
            return repeat(0.0)
        random = Random(f"{self.seed} {sequence}")
        return (random.random() for _ in repeat(None))

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Choose ids (S,), int64, from `logits` (S, vocab) by `numbers` (S,) of [0, 1).

        NOT_FINITE for a row whose largest logit is not finite.
        """
        if not self.temperature:
            return argmax_ids(logits)
        largest = logits.max(-1).values
        ids = self._draw(logits.double() - largest.double()[:, None], numbers.double())
        return _mark_nonfinite(ids, largest)

    def _draw(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Draw ids (S,) from logits of at most 0, (S, vocab)."""
        sorted_logits, order = (logits / self.temperature).sort(stable=True, dim=-1, descending=True)
        p = sorted_logits[:, : self.top_k].softmax(-1)
        before = p.cumsum(-1) - p
        p = torch.where(before < self.top_p, p, 0)
        # Sums in the order of ids: rounding may exchange logits that are nearly equal.
        sums = torch.zeros_like(logits).scatter(-1, order[:, : p.shape[1]], p).cumsum(-1)
        total = sums[:, -1:]
        at = torch.searchsorted(sums, numbers[:, None] * total, right=True)
        last = (sums < total).sum(-1, keepdim=True)  # for a product that is rounded up to the sum
        return at.minimum(last)[:, 0]


GREEDY = Sampler()
DRAWING = Sampler(temperature=1.0)  # for warm-up


def argmax_ids(logits: Tensor) -> Tensor:
    """Return the ids (S,), int64, of the largest of `logits` (S, vocab); NOT_FINITE if it is not finite."""
    largest, ids = logits.max(-1)
    return _mark_nonfinite(ids, largest)


def _mark_nonfinite(ids: Tensor, largest: Tensor) -> Tensor:
    return ids.masked_fill(~largest.isfinite(), NOT_FINITE)


def check_finite(ids: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ArgumentError for a chosen id of logits that are not finite, computed in a `dtype`."""
    if NOT_FINITE in ids:
        name = str(dtype).removeprefix("torch.")
        raise ArgumentError("dtype", "a dtype of wider range: logits must be finite", name)


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """Raise ArgumentError for an id outside of a vocabulary of `vocab`."""
    invalid = next((token for token in ids if not 0 <= token < vocab), None)
    if invalid is not None:
        raise ArgumentError("ids", f"ids of a vocabulary of {vocab}: 0 to {vocab - 1}", str(invalid))


@checked
def check_prompt(
    prompt_ids: Sequence[int], tokens: int, vocab: int, max_tokens: int, longest: int | None = None
) -> None:
    """Raise ArgumentError for a prompt that a model cannot read, or not continue by `tokens` tokens.

    Parameters
    ----------
    prompt_ids, tokens
        The ids, at least one, and the number of new tokens.
    vocab
        Size of the vocabulary.
    max_tokens
        Largest length of a sequence.
    longest
        Largest length of a prompt; None: `max_tokens`.
    """
    check_ids(prompt_ids, vocab)
    limit = max_tokens if longest is None else min(max_tokens, longest)
    if not 1 <= len(prompt_ids) <= limit:
        raise ArgumentError("prompt_ids", f"1 to {limit} ids", f"{len(prompt_ids)} ids")
    if tokens < 0 or len(prompt_ids) + tokens > max_tokens:
        limit = max_tokens - len(prompt_ids)
        raise ArgumentError("tokens", f"0 to {limit} after a prompt of {len(prompt_ids)}", str(tokens))


class StepGraph:
    """Decode step captured as a CUDA graph, for a fixed number of sequences.

    Inputs are copied to the graph's memory, those of the host in one copy. A capture returns torch's cached
    device memory; memory that is to stay cached has to be allocated afterwards.

    Parameters
    ----------
    step
        Inputs on the device -> tensors, without a synchronization with the host.
    inputs
        Tensors of one dtype on the device for the first runs, which write their slots of the cache.
    other
        Another graph, never replayed at the same time, whose memory pool and stream are shared.
    """

    def __init__(self, step: StepCall, inputs: Sequence[Tensor], other: "StepGraph | None") -> None:
        self._memory = torch.cat([tensor.flatten() for tensor in inputs])
        parts = torch.split(self._memory, [tensor.numel() for tensor in inputs])
        self._inputs = [part.view(tensor.shape) for part, tensor in zip(parts, inputs, strict=True)]
        device = inputs[0].device
        stream: Any = torch.cuda.Stream(device) if other is None else other.stream  # type: ignore[no-untyped-call]
        self.stream: Any = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(GRAPH_WARM_UPS):
                step(*self._inputs)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool
        # The watchdog of a process group queries its events meanwhile, which must not break the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._outputs = step(*self._inputs)
        self._released = False
        register_capture(self)

    def release(self) -> None:
        """Free the graph, so that NCCL can destroy its communicators; later calls raise ArgumentError."""
        self._released = True
        torch.cuda.synchronize(self._memory.device)
        self._graph.reset()

    @property
    def pool(self) -> Any:
        """Memory pool of the graph."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Replay the step on inputs of the same shapes and return copies of its outputs, without waiting.

        `inputs`: those on the device before those on the host. ArgumentError once the graph is freed.
        """
        if self._released:
            raise ArgumentError("engine", "a call within the world of its warm-up", "a later call")
        on_host = [tensor.flatten() for tensor in inputs if not tensor.is_cuda]
        if on_host:
            joined = torch.cat(on_host)
            self._memory[-joined.numel() :].copy_(pin(joined), non_blocking=True)
        for target, tensor in zip(self._inputs, inputs[: len(inputs) - len(on_host)], strict=False):
            target.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)


def pad_prompt(size: int, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the last of a prompt's tokens, `ids` (T,) at `places` (2, T), up to `size` tokens.

    Repetitions have its position, and so its outputs, but write to the padding page.
    """
    more = size - len(ids)
    last = torch.tensor([[int(places[0, -1])], [PADDING_PAGE]])  # position; the first slot of the page
    return torch.cat([ids, ids[-1:].expand(more)]), torch.cat([places, last.expand(2, more)], 1)


def pin(tensor: Tensor) -> Tensor:
    """Copy a host tensor to pinned memory, for a copy to the device that the host does not wait for.

    torch's allocator reuses the memory only after the copy.
    """
    return tensor.pin_memory()


class StepOutput(NamedTuple):
    """Output of a step: logits (S, vocab), and their argmax ids (S,) if a graph has computed them."""

    logits: Tensor
    argmax: Tensor | None = None

    def of_rows(self, rows: Sequence[int]) -> "StepOutput":
        """Return the output of some of the sequences."""
        at = [*rows]
        return StepOutput(self.logits[at], None if self.argmax is None else self.argmax[at])


class Engine:
    """Model with a cache for several sequences, which it continues token by token.

    Every rank of a tensor-parallel model creates one and makes the same calls; tokens are chosen by rank 0.
    ArgumentError for sizes below 1, and for more `max_tokens` than the model has positions.

    Parameters
    ----------
    model
        Result of `load_model`.
    max_tokens
        Largest length of a sequence, prompt included.
    max_sequences
        Largest number of sequences at once.
    page_size
        Tokens of a page of the cache.
    graphs
        Whether `warm_up` captures decode steps and prompts in CUDA graphs; None: on a CUDA device.
    """

    @checked
    def __init__(
        self,
        model: Decoder,
        *,
        max_tokens: int,
        max_sequences: int = 1,
        page_size: int = 16,
        graphs: bool | None = None,
    ) -> None:
        sizes = {"max_tokens": max_tokens, "max_sequences": max_sequences, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(name, "at least 1", str(size))
        if max_tokens > model.config.positions:
            raise ArgumentError("max_tokens", f"at most {model.config.positions} positions", str(max_tokens))
        self.model: Decoder = model
        self.max_tokens: int = max_tokens
        self.max_sequences: int = max_sequences
        self._table = PageTable(max_sequences, max_tokens, page_size)
        self.width: int = self._table.width
        embedding: Any = model.embed_tokens
        self.dtype: torch.dtype = embedding.weight.dtype
        self.device: torch.device = embedding.weight.device
        self._ranks: Collectives = embedding.collectives or collectives_of(ALONE)
        self.cache: PagedCache = PagedCache.of(
            model.config,
            pages=self._table.pages,
            page_size=page_size,
            ranks=self._ranks.size(),
            dtype=self.dtype,
            device=self.device,
        )
        self._max_prompt_tokens = max_tokens
        self._use_graphs = self.device.type == "cuda" if graphs is None else graphs
        self._graphs: dict[int, StepGraph] = {}
        self._prompt_graphs: dict[int, StepGraph] = {}  # by tokens
        self.runs_ahead: bool = self.device.type == "cuda"  # starts a step before the host reads its tokens

    @checked
    def warm_up(self, prompt_tokens: int) -> None:
        """Allocate all memory: run the longest prompt, shorter ones, and a step of each number of sequences.

        Drops all sequences. Afterwards a prompt may have `prompt_tokens` tokens at most. On a CUDA device,
        decode steps are graphs, and, in models without experts, prompts of up to `MAX_GRAPH_TOKENS` tokens.
        ArgumentError for more tokens than a sequence may have.
        """
        if not 1 <= prompt_tokens <= self.max_tokens:
            raise ArgumentError("prompt_tokens", f"1 to {self.max_tokens}", str(prompt_tokens))
        self._max_prompt_tokens = prompt_tokens
        warm_up(self.model, max(prompt_tokens, self.max_sequences))
        if self._use_graphs:  # the largest first: the others fit its memory
            self._prompt_graphs = {}
            for size in prompt_sizes(self.model.config, prompt_tokens)[::-1]:
                self._capture_prompt(size)
            for count in range(self.max_sequences, 0, -1):
                self._capture(count)
        logits = self._warm_up_prefill(prompt_tokens)
        for count in range(1, self.max_sequences + 1):
            self._fill(count)
            previous = logits.new_zeros(count, logits.shape[1])  # alive while the next step runs
            self._choose(self._decode_step([0] * count, range(count)), DRAWING, [0.0] * count)
            del previous
        self.reset()
        graphs = len(self._graphs) + len(self._prompt_graphs)
        log.info("warm: prompts of %d tokens, %d graphs", prompt_tokens, graphs)

    def _warm_up_prefill(self, size: int) -> Tensor:
        """Run prompts of `size` tokens and of fewer, with the logits of all other prompts alive."""
        spare = [
            torch.empty(SMALL_TENSOR_BYTES, dtype=torch.uint8, device=self.device)
            for _ in range(MAX_SMALL_TENSORS)
        ]
        del spare  # a tensor of a shorter prompt may be small where that of the longest is not
        logits = self._warm_up_prompt(1)
        others = [torch.zeros_like(logits) for _ in range(self.max_sequences - 1)]
        while size:
            logits = self._warm_up_prompt(size)
            size //= 2
        self._choose(StepOutput(torch.cat([logits, *others])), DRAWING, [0.0] * self.max_sequences)
        return logits

    def _warm_up_prompt(self, size: int) -> Tensor:
        """Run a prompt of `size` tokens without a graph, as one of embeddings."""
        self._drop(0)
        return self.run(torch.zeros(size, dtype=torch.int64), *self.places([0], size))

    def reset(self) -> None:
        """Drop all sequences."""
        for sequence in range(self.max_sequences):
            self._drop(sequence)

    def _drop(self, sequence: int) -> None:
        """Free the pages of a sequence and zero them: a mask would not hide a NaN from the next sequence."""
        freed = self._table.restart(sequence)
        if freed:
            pages = torch.tensor(freed).to(self.device)
            for cells in self.cache.buffers():
                cells.index_fill_(1, pages, 0)

    def check(self, prompt_ids: Sequence[int], tokens: int) -> None:
        """Raise ArgumentError unless `tokens` new tokens can follow the prompt `prompt_ids`."""
        check_prompt(prompt_ids, tokens, self.model.config.vocab, self.max_tokens, self._max_prompt_tokens)

    @checked
    def prefill(self, ids: Sequence[int], sequence: int = 0, embeddings: Tensor | None = None) -> Tensor:
        """Begin sequence number `sequence` with a prompt `ids` -> logits (1, vocab) of the next token.

        `embeddings`: (T, H) in place of those of the ids, as from `VisionModel.embed`. ArgumentError for a
        prompt that `check` refuses, and for an invalid sequence number.
        """
        self.check(ids, 0)
        self._check_sequences([sequence], 1)
        self._drop(sequence)
        if embeddings is None:
            return self._run_prompt(torch.tensor([*ids]), sequence)
        return self._run_embedded(embeddings, *self.places([sequence], len(ids)))

    @checked
    def decode(self, ids: Sequence[int], sequences: Sequence[int] | None = None) -> Tensor:
        """Append a token to each of S sequences, `ids` (S,) -> logits (S, vocab) of the next token.

        `sequences`: their numbers, each once; None: the first ones. ArgumentError for invalid numbers, for
        ids outside of the vocabulary, and for a sequence of `max_tokens` tokens.
        """
        return self._decode_step(ids, range(len(ids)) if sequences is None else sequences).logits

    def _decode_step(self, ids: Sequence[int], sequences: Sequence[int]) -> StepOutput:
        self._check_sequences(sequences, len(ids))
        for token, sequence in zip(ids, sequences, strict=True):
            check_ids([token], self.model.config.vocab)
            if self._table.length(sequence) == self.max_tokens:
                raise ArgumentError("ids", f"at most {self.max_tokens} tokens per sequence", "one more")
        return self._run_next(torch.tensor([*ids]), sequences)

    def _run_prompt(self, ids: Tensor, sequence: int) -> Tensor:
        """Run the prompt `ids` (T,) of a sequence, in the smallest graph for as many tokens: (1, vocab)."""
        sizes = [size for size in self._prompt_graphs if size >= len(ids) > 1]
        if not sizes:
            return self._run_next(ids, [sequence]).logits
        size = min(sizes)
        places, pages = self.places([sequence], len(ids), self._prompt_pages(size))
        return self._prompt_graphs[size](*pad_prompt(size, ids, places), pages)[0]

    def _prompt_pages(self, size: int) -> int:
        """Pages of a prompt of `size` tokens."""
        return -(-size // self._table.page_size)

    def _run_next(self, ids: Tensor, sequences: Sequence[int]) -> StepOutput:
        """Run equally many new tokens of each of S sequences, `ids` (T,) on any device."""
        count = len(ids) // len(sequences)
        graph = self._graphs.get(len(sequences)) if count == 1 else None
        places = self.places(sequences, count, None if graph is None else self.width)
        return StepOutput(self.run(ids, *places)) if graph is None else StepOutput(*graph(ids, *places))

    def _check_sequences(self, sequences: Sequence[int], count: int) -> None:
        valid = {*sequences} <= {*range(self.max_sequences)}
        if not valid or len({*sequences}) != len(sequences) or len(sequences) != count or not count:
            expected = f"one per id, each once, of 0 to {self.max_sequences - 1}"
            raise ArgumentError("sequences", expected, f"{[*sequences][:8]} for {count} ids")

    @checked
    def generate(self, prompt_ids: Sequence[int], tokens: int, sampler: Sampler = GREEDY) -> list[int]:
        """Generate the ids that follow `prompt_ids`, chosen by a `sampler`; errors as of `stream`.

        `tokens` ids, or fewer if the model ends the text, with the end-of-text id as the last.
        """
        return [chosen[0] for chosen in self.stream([prompt_ids], tokens, sampler)]

    @checked
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampler: Sampler = GREEDY,
        embeddings: Sequence[Tensor | None] | None = None,
    ) -> Iterator[dict[int, int]]:
        """Generate step by step: the next id of each unfinished prompt, by its index in `prompts`.

        At most `tokens` steps, with ids chosen by a `sampler`. `embeddings`: of each prompt, as in `prefill`,
        or None. ArgumentError for more prompts than sequences,
        for ids outside of the vocabulary, for more tokens than a sequence may have, and for logits that are
        not finite.
        """
        if not 1 <= len(prompts) <= self.max_sequences:
            raise ArgumentError("prompts", f"1 to {self.max_sequences}", str(len(prompts)))
        for prompt in prompts:
            self.check(prompt, tokens)
        return self._generate_steps(prompts, tokens, sampler, embeddings or [None] * len(prompts))

    def _generate_steps(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        sampler: Sampler,
        embeddings: Sequence[Tensor | None],
    ) -> Iterator[dict[int, int]]:
        numbers = [sampler.numbers(index) for index in range(len(prompts))]
        active = list(range(len(prompts)))
        inputs = enumerate(zip(prompts, embeddings, strict=True))
        output = StepOutput(torch.cat([self.prefill(ids, index, x) for index, (ids, x) in inputs]))
        for left in range(tokens - 1, -1, -1):
            chosen = self._choose(output, sampler, [next(numbers[index]) for index in active])
            wait_for_ids = self._copy_to_host(chosen)
            if left and self.runs_ahead:
                output = self._run_next(chosen.clamp(min=0), active)
            ids = wait_for_ids()
            check_finite(ids, self.dtype)
            yield dict(zip(active, ids, strict=True))
            rows = [row for row, token in enumerate(ids) if token not in self.model.config.eos]
            if not rows or not left:
                return
            ended, active = len(rows) < len(active), [active[row] for row in rows]
            if not self.runs_ahead:
                output = self._run_next(chosen[rows], active)
            elif ended:
                output = output.of_rows(rows)

    def _choose(self, output: StepOutput, sampler: Sampler, numbers: Sequence[float]) -> Tensor:
        """Choose the next ids (S,), on every rank as on rank 0, without waiting for the device."""
        if output.argmax is not None and not sampler.temperature:
            return self._ranks.first(output.argmax)
        random = torch.tensor(numbers, dtype=torch.float64)
        if output.logits.is_cuda:
            random = pin(random).to(output.logits.device, non_blocking=True)
        return self._ranks.first(sampler.choose(output.logits, random))

    def _copy_to_host(self, ids: Tensor) -> Callable[[], list[int]]:
        """Start a copy of ids to the host; return a function that waits for this copy alone."""
        host = ids.to("cpu", non_blocking=True)
        if ids.device.type != "cuda":
            return host.tolist
        copied = torch.cuda.current_stream(ids.device).record_event()

        def wait() -> list[int]:
            copied.synchronize()
            return host.tolist()

        return wait

    def places(self, sequences: Sequence[int], each: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Allocate `each` new tokens of `sequences`: positions and slots (2, T), and pages (S, P).

        On the host. `width`: P; None: the pages of the longest sequence.
        """
        grown = [self._table.grow(sequence, each) for sequence in sequences]
        positions, slots = ([at for part in parts for at in part] for parts in zip(*grown, strict=True))
        return torch.tensor([positions, slots]), torch.tensor(self._table.table(sequences, width))

    @torch.no_grad()
    def run(self, ids: Tensor, places: Tensor, pages: Tensor) -> Tensor:
        """Run a step of `ids` (T,) at `places` (2, T) with `pages` (S, P) -> next logits (S, vocab)."""
        return self._run_embedded(self.model.embed(ids.to(self.device)), places, pages)

    @torch.no_grad()
    def _run_embedded(self, x: Tensor, places: Tensor, pages: Tensor) -> Tensor:
        """Run a step of embeddings x (T, H), as `run`."""
        positions, slots = places.to(self.device)
        x = self.model.hidden(x, Step(positions, slots, pages.to(self.device)), self.cache)
        return self.model.logits(x.view(len(pages), -1, x.shape[-1])[:, -1])

    def _fill(self, count: int) -> None:
        """Fill the first `count` sequences up to their last token, for a step with the longest page table."""
        self.reset()
        for sequence in range(count if self.max_tokens > 1 else 0):
            self._table.grow(sequence, self.max_tokens - 1)

    def _capture(self, count: int) -> None:
        """Capture the graph of a step of `count` sequences."""
        self._fill(count)
        inputs = torch.zeros(count, dtype=torch.int64), *self.places(range(count), 1, self.width)
        self._graphs[count] = self._record(self._run_and_choose, inputs)

    def _capture_prompt(self, size: int) -> None:
        """Capture the graph of a prompt of `size` tokens."""
        self.reset()
        inputs = torch.zeros(size, dtype=torch.int64), *self.places([0], size, self._prompt_pages(size))
        self._prompt_graphs[size] = self._record(self._run_padded, inputs)

    def _record(self, step: StepCall, inputs: Sequence[Tensor]) -> StepGraph:
        other = next(chain(self._prompt_graphs.values(), self._graphs.values()), None)
        return StepGraph(step, [tensor.to(self.device) for tensor in inputs], other)

    def _run_padded(self, ids: Tensor, places: Tensor, pages: Tensor) -> tuple[Tensor, ...]:
        """`run` a padded prompt."""
        logits = self.run(ids, places, pages)
        for cells in self.cache.buffers():
            cells[:, PADDING_PAGE].zero_()  # a mask would not hide a NaN from the next sequence
        return (logits,)

    def _run_and_choose(self, ids: Tensor, places: Tensor, pages: Tensor) -> tuple[Tensor, ...]:
        """`run`, and the ids (S,) of the largest logits."""
        logits = self.run(ids, places, pages)
        return logits, argmax_ids(logits)
