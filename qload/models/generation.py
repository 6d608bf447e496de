"""Prompts in, tokens out: prefill and decode of a model, its keys and values in pages of a cache.

engine = Engine(model, max_tokens=256, max_sequences=4)
engine.warm_up(prompt_tokens=128)             # from here on no more memory is taken
ids = engine.generate([1, 2, 3], tokens=16)
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qload.errors import ArgumentError, check_fields, checked
from qload.kernels.scratch import warm_up
from qload.models.decoder import Decoder
from qload.models.kv_cache import PagedCache, PageTable, Step
from qload.parallel import ALONE, Collectives, collectives_of, register_capture

StepCall = Callable[..., tuple[Tensor, ...]]
WARM_RUNS = 2  # before a capture: what is made in a first call must not be made in a graph


class StepGraph:
    """A step on a CUDA device whose inputs are copied to where the graph reads them, all of the host in one.

    Parameters
    ----------
    step
        Inputs on the device -> tensors. It asks nothing of the host.
    inputs
        Tensors of one dtype on the device that the first runs may use; their cells of the cache are written.
    other
        Another graph, which never runs at the same time: they share its memory and that of its libraries.
    """

    def __init__(self, step: StepCall, inputs: Sequence[Tensor], other: "StepGraph | None" = None) -> None:
        self._memory = torch.cat([each.flatten() for each in inputs])
        parts = torch.split(self._memory, [each.numel() for each in inputs])
        self._inputs = [part.view(each.shape) for part, each in zip(parts, inputs, strict=True)]
        device = inputs[0].device
        stream: Any = torch.cuda.Stream(device) if other is None else other.stream  # type: ignore[no-untyped-call]
        self.stream: Any = stream
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                step(*self._inputs)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        pool = None if other is None else other.pool
        # The watch of a process group asks after its events meanwhile, which may not break the capture.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._made = step(*self._inputs)
        self._released = False
        register_capture(self)

    def release(self) -> None:
        """Free the graph, so that NCCL can destroy its communicators; later calls raise ArgumentError."""
        self._released = True
        torch.cuda.synchronize(self._memory.device)
        self._graph.reset()

    @property
    def pool(self) -> Any:
        """The graph's memory."""
        return self._graph.pool()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The step on inputs of the same shapes -> copies of its results; the host waits for nothing.

        `inputs`: any on the device, and behind them any on the host. ArgumentError once the graph is freed.
        """
        if self._released:
            raise ArgumentError("engine", "a call within the world that it was warmed up in", "one after it")
        on_host = [each.flatten() for each in inputs if not each.is_cuda]
        if on_host:
            given = torch.cat(on_host)
            self._memory[-given.numel() :].copy_(pinned(given), non_blocking=True)
        for place, each in zip(self._inputs, inputs[: len(inputs) - len(on_host)], strict=False):
            place.copy_(each, non_blocking=True)
        self._graph.replay()
        return tuple(each.clone() for each in self._made)


def pinned(tensor: Tensor) -> Tensor:
    """A copy of a tensor of the host from which the device copies while the host goes on.

    Its memory is used again only once that is done: torch's allocator keeps an account of it.
    """
    return tensor.pin_memory()


def check_ids(ids: Sequence[int], vocab: int) -> None:
    """ArgumentError for one of `ids` that is outside of a vocabulary of `vocab`."""
    wrong = next((each for each in ids if not 0 <= each < vocab), None)
    if wrong is not None:
        raise ArgumentError("ids", f"ids of a vocabulary of {vocab}: 0 to {vocab - 1}", str(wrong))


@checked
def check_prompt(
    prompt_ids: Sequence[int], tokens: int, vocab: int, max_tokens: int, longest: int | None = None
) -> None:
    """ArgumentError unless a model can read the prompt and write so many tokens after it.

    Parameters
    ----------
    prompt_ids, tokens
        The ids, at least one, and how many are to follow.
    vocab
        How many ids there are.
    max_tokens
        How many tokens a sequence may have.
    longest
        How many of them its prompt may have; None: all.
    """
    check_ids(prompt_ids, vocab)
    most = max_tokens if longest is None else min(max_tokens, longest)
    if not 1 <= len(prompt_ids) <= most:
        raise ArgumentError("prompt_ids", f"1 to {most} ids", f"{len(prompt_ids)} ids")
    if tokens < 0 or len(prompt_ids) + tokens > max_tokens:
        most = max_tokens - len(prompt_ids)
        raise ArgumentError("tokens", f"0 to {most} after a prompt of {len(prompt_ids)}", str(tokens))


NOT_FINITE = -1  # in the place of a token, where no logit is the largest


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen of logits; by default the one with the largest. ArgumentError for other values.

    Attributes
    ----------
    temperature
        What logits are divided by, at least 0; 0 takes the largest and draws nothing.
    top_k
        How many of the likeliest tokens are kept, at least 1; None keeps all.
    top_p
        Which share of the probability of those is kept, 0 < top_p <= 1.
    seed
        What the numbers come from that tokens are drawn by.
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
        """The numbers of [0, 1) that tokens of sequence number `sequence` are drawn by, one after another."""
        if not self.temperature:
            return repeat(0.0)
        drawn = Random(f"{self.seed} {sequence}")
        return (drawn.random() for _ in repeat(None))

    def choose(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """The ids (S,), int64, that `logits` (S, vocab) and `numbers` (S,) of [0, 1) choose.

        NOT_FINITE where the largest logit is no finite number.
        """
        if not self.temperature:
            return likeliest(logits)
        largest = logits.max(-1).values
        ids = self._drawn(logits.double() - largest.double()[:, None], numbers.double())
        return _where_finite(ids, largest)

    def _drawn(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """Logits of at most 0, (S, vocab) -> ids (S,)."""
        sorted_logits, order = (logits / self.temperature).sort(stable=True, dim=-1, descending=True)
        p = sorted_logits[:, : self.top_k].softmax(-1)
        before = p.cumsum(-1) - p
        kept = torch.where(before < self.top_p, p, 0)
        # In the order of ids: logits that are nearly equal may change places as sums are rounded.
        sums = torch.zeros_like(logits).scatter(-1, order[:, : kept.shape[1]], kept).cumsum(-1)
        whole = sums[:, -1:]
        at = torch.searchsorted(sums, numbers[:, None] * whole, right=True)
        last = (sums < whole).sum(-1, keepdim=True)  # where a product is rounded up to the sum
        return at.minimum(last)[:, 0]


def likeliest(logits: Tensor) -> Tensor:
    """The ids (S,), int64, of the largest of `logits` (S, vocab); NOT_FINITE where that is not finite."""
    largest, ids = logits.max(-1)
    return _where_finite(ids, largest)


def _where_finite(ids: Tensor, largest: Tensor) -> Tensor:
    return ids.masked_fill(~largest.isfinite(), NOT_FINITE)


GREEDY = Sampler()


log: logging.Logger = logging.getLogger("qload")

SMALL, SPARE = 1 << 20, 32  # torch takes tensors of up to 1 MiB from blocks apart; few of a step live at once


class Made(NamedTuple):
    """What a step made: logits (S, vocab), and the ids (S,) of the largest where a graph has chosen them."""

    logits: Tensor
    likeliest: Tensor | None = None

    def of_rows(self, rows: Sequence[int]) -> "Made":
        """Of some of the sequences."""
        at = [*rows]
        return Made(self.logits[at], None if self.likeliest is None else self.likeliest[at])


class Engine:
    """A model with a cache for some sequences, which it continues token by token.

    Every rank of a tensor-parallel model makes one and calls it alike; the tokens that are chosen are those
    of rank 0. ArgumentError for sizes below 1, and where the model has fewer positions than `max_tokens`.

    Parameters
    ----------
    model
        What `load_model` gives.
    max_tokens
        How many tokens a sequence has at most, those of its prompt among them.
    max_sequences
        How many sequences there are at once.
    page_size
        How many tokens a page of the cache holds.
    graphs
        Whether `warm_up` captures decode steps in CUDA graphs; None: on a CUDA device.
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
        self._longest_prompt = max_tokens
        self._wants_graphs = self.device.type == "cuda" if graphs is None else graphs
        self._graphs: dict[int, StepGraph] = {}
        self.runs_ahead: bool = self.device.type == "cuda"  # begins a step before the host reads its tokens

    @checked
    def warm_up(self, prompt_tokens: int) -> None:
        """Take all memory there is to take: run the longest prompt, shorter ones, and a step of each size.

        Sequences that have begun are forgotten. Afterwards a prompt may have `prompt_tokens` tokens at most,
        and on a CUDA device decode steps are graphs. ArgumentError where a sequence cannot have as many.
        """
        if not 1 <= prompt_tokens <= self.max_tokens:
            raise ArgumentError("prompt_tokens", f"1 to {self.max_tokens}", str(prompt_tokens))
        self._longest_prompt = prompt_tokens
        warm_up(self.model, max(prompt_tokens, self.max_sequences))
        if self._wants_graphs:
            for count in range(self.max_sequences, 0, -1):  # the largest first: the others fit its memory
                self._capture(count)
        logits = self._warm_prefill(prompt_tokens)
        for count in range(1, self.max_sequences + 1):
            self._fill(count)
            before = logits.new_zeros(count, logits.shape[1])  # which a step is begun beside
            self._choose(self._decoded([0] * count, range(count)), Sampler(temperature=1.0), [0.0] * count)
            del before
        self.reset()
        log.info("warm: prompts of %d tokens, %d graphs", prompt_tokens, len(self._graphs))

    def _warm_prefill(self, size: int) -> Tensor:
        """Run prompts of `size` tokens and of fewer, beside the logits of all other prompts."""
        spare = [torch.empty(SMALL, dtype=torch.uint8, device=self.device) for _ in range(SPARE)]
        del spare  # what a longer prompt takes elsewhere, a shorter one may take of small blocks
        logits = self.prefill([0])
        held = [torch.zeros_like(logits) for _ in range(self.max_sequences - 1)]
        while size:
            logits = self.prefill([0] * size)
            size //= 2
        self._choose(Made(torch.cat([logits, *held])), Sampler(temperature=1.0), [0.0] * self.max_sequences)
        return logits

    def reset(self) -> None:
        """Forget all sequences."""
        for sequence in range(self.max_sequences):
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        """Free the pages of a sequence, without a NaN for the next one: a mask hides numbers alone."""
        freed = self._table.restart(sequence)
        if freed:
            pages = torch.tensor(freed).to(self.device)
            for held in (self.cache.keys, self.cache.values):
                held.index_fill_(1, pages, 0)

    def check(self, prompt_ids: Sequence[int], tokens: int) -> None:
        """ArgumentError unless `tokens` new ones can follow the prompt `prompt_ids`."""
        check_prompt(prompt_ids, tokens, self.model.config.vocab, self.max_tokens, self._longest_prompt)

    @checked
    def prefill(self, ids: Sequence[int], sequence: int = 0) -> Tensor:
        """Begin sequence number `sequence` with a prompt `ids` -> logits (1, vocab) of what follows it.

        ArgumentError for a prompt that `check` refuses, and for a sequence that there is not.
        """
        self.check(ids, 0)
        self._check_sequences([sequence], 1)
        self._forget(sequence)
        return self._next(torch.tensor([*ids]), [sequence]).logits

    @checked
    def decode(self, ids: Sequence[int], sequences: Sequence[int] | None = None) -> Tensor:
        """One more token of S sequences, `ids` (S,) -> logits (S, vocab) of what follows them.

        `sequences`: which, each once; None: the first ones. ArgumentError for other sequences, for ids
        outside of the vocabulary, and where a sequence has all the tokens that it may have.
        """
        return self._decoded(ids, range(len(ids)) if sequences is None else sequences).logits

    def _decoded(self, ids: Sequence[int], sequences: Sequence[int]) -> Made:
        self._check_sequences(sequences, len(ids))
        for token, sequence in zip(ids, sequences, strict=True):
            check_ids([token], self.model.config.vocab)
            if self._table.length(sequence) == self.max_tokens:
                raise ArgumentError("ids", f"at most {self.max_tokens} tokens of a sequence", "one more")
        return self._next(torch.tensor([*ids]), sequences)

    def _next(self, ids: Tensor, sequences: Sequence[int]) -> Made:
        """As many new tokens of each of S sequences, `ids` (T,) on any device -> what follows them."""
        each = len(ids) // len(sequences)
        graph = self._graphs.get(len(sequences)) if each == 1 else None
        places = self.places(sequences, each, None if graph is None else self.width)
        return Made(self.run(ids, *places)) if graph is None else Made(*graph(ids, *places))

    def _check_sequences(self, sequences: Sequence[int], count: int) -> None:
        there = {*sequences} <= {*range(self.max_sequences)}
        if not there or len({*sequences}) != len(sequences) or len(sequences) != count or not count:
            expected = f"as many as there are ids, each once, of 0 to {self.max_sequences - 1}"
            raise ArgumentError("sequences", expected, f"{[*sequences][:8]} for {count} ids")

    @checked
    def generate(self, prompt_ids: Sequence[int], tokens: int, sampler: Sampler = GREEDY) -> list[int]:
        """The ids that follow `prompt_ids`, chosen by a `sampler`; its errors are those of `stream`.

        `tokens` of them, or fewer where the model ends the text, the last of which says so.
        """
        return [chosen[0] for chosen in self.stream([prompt_ids], tokens, sampler)]

    @checked
    def stream(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampler: Sampler = GREEDY
    ) -> Iterator[dict[int, int]]:
        """The next id of every prompt that has not ended, by its place in `prompts`; step by step.

        `tokens` steps at most, whose ids a `sampler` chooses. ArgumentError for more prompts than sequences,
        for ids outside of the vocabulary, for more tokens than a sequence may have, and for logits that are
        not finite.
        """
        if not 1 <= len(prompts) <= self.max_sequences:
            raise ArgumentError("prompts", f"1 to {self.max_sequences}", str(len(prompts)))
        for prompt in prompts:
            self.check(prompt, tokens)
        return self._steps(prompts, tokens, sampler)

    def _steps(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampler: Sampler
    ) -> Iterator[dict[int, int]]:
        numbers = [sampler.numbers(place) for place in range(len(prompts))]
        going = list(range(len(prompts)))
        made = Made(torch.cat([self.prefill(prompt, place) for place, prompt in enumerate(prompts)]))
        for left in range(tokens - 1, -1, -1):
            chosen = self._choose(made, sampler, [next(numbers[place]) for place in going])
            read = self._reading(chosen)
            if left and self.runs_ahead:
                made = self._next(chosen.clamp(min=0), going)
            ids = read()
            if NOT_FINITE in ids:
                dtype = str(self.dtype).removeprefix("torch.")
                raise ArgumentError("dtype", "one in which the model's logits are finite", dtype)
            yield dict(zip(going, ids, strict=True))
            rows = [row for row, token in enumerate(ids) if token not in self.model.config.eos]
            if not rows or not left:
                return
            ended, going = len(rows) < len(going), [going[row] for row in rows]
            if not self.runs_ahead:
                made = self._next(chosen[rows], going)
            elif ended:
                made = made.of_rows(rows)

    def _choose(self, made: Made, sampler: Sampler, numbers: Sequence[float]) -> Tensor:
        """The ids (S,) that rank 0 has chosen; the host waits for nothing."""
        if made.likeliest is not None and not sampler.temperature:
            return self._ranks.first(made.likeliest)
        drawn = torch.tensor(numbers, dtype=torch.float64)
        if made.logits.is_cuda:
            drawn = pinned(drawn).to(made.logits.device, non_blocking=True)
        return self._ranks.first(sampler.choose(made.logits, drawn))

    def _reading(self, ids: Tensor) -> Callable[[], list[int]]:
        """Begin to copy ids to the host; what returns them waits for this alone, not for what comes after."""
        host = ids.to("cpu", non_blocking=True)
        if ids.device.type != "cuda":
            return host.tolist
        copied = torch.cuda.current_stream(ids.device).record_event()

        def wait() -> list[int]:
            copied.synchronize()
            return host.tolist()

        return wait

    def places(self, sequences: Sequence[int], each: int, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Where `each` new tokens of `sequences` go: positions and slots (2, T), and pages (S, P).

        On the host. `width`: P; None: as many pages as the longest sequence has.
        """
        grown = [self._table.grow(sequence, each) for sequence in sequences]
        positions, slots = ([at for part in parts for at in part] for parts in zip(*grown, strict=True))
        return torch.tensor([positions, slots]), torch.tensor(self._table.table(sequences, width))

    @torch.no_grad()
    def run(self, ids: Tensor, places: Tensor, pages: Tensor) -> Tensor:
        """A step of `ids` (T,) at `places` (2, T) with `pages` (S, P) -> logits (S, vocab) of the next."""
        positions, slots = places.to(self.device)
        x = self.model.embed(ids.to(self.device))
        x = self.model.hidden(x, Step(positions, slots, pages.to(self.device)), self.cache)
        return self.model.logits(x.view(len(pages), -1, x.shape[-1])[:, -1])

    def _fill(self, count: int) -> None:
        """The first `count` sequences have all their tokens but one: as wide as a step becomes."""
        self.reset()
        for sequence in range(count if self.max_tokens > 1 else 0):
            self._table.grow(sequence, self.max_tokens - 1)

    def _capture(self, count: int) -> None:
        """Make the graph of a step of so many sequences."""
        self._fill(count)
        inputs = torch.zeros(count, dtype=torch.int64), *self.places(range(count), 1, self.width)
        other = next(iter(self._graphs.values()), None)
        self._graphs[count] = StepGraph(
            self._run_and_choose, [each.to(self.device) for each in inputs], other
        )

    def _run_and_choose(self, ids: Tensor, places: Tensor, pages: Tensor) -> tuple[Tensor, ...]:
        """`run`, and the ids (S,) of the largest logits."""
        logits = self.run(ids, places, pages)
        return logits, likeliest(logits)
