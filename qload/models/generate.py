"""Prompts in, tokens out: prefill and decode of a model, its keys and values in pages of a cache.

engine = Engine(model, max_tokens=256, max_sequences=4)
engine.warm_up(prompt_tokens=128)             # from here on no more memory is taken
ids = engine.generate([1, 2, 3], tokens=16)
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qload.errors import ArgumentError, checked
from qload.kernels.scratch import warm_up
from qload.models.cache import PagedCache
from qload.models.decoder import Decoder
from qload.models.graph import StepGraph
from qload.models.pages import PageTable
from qload.models.sampling import GREEDY, NOT_FINITE, Sampler
from qload.models.step import Step
from qload.parallel import ALONE, Collectives, collectives_of

log: logging.Logger = logging.getLogger("qload")

SMALL, SPARE = 1 << 20, 32  # torch takes tensors of up to 1 MiB from blocks apart; few of a step live at once


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
        self._warm_prefill(prompt_tokens)
        for count in range(1, self.max_sequences + 1):
            self._fill(count)
            self._choose(self.decode([0] * count), Sampler(temperature=1.0), [0.0] * count)
        self.reset()
        log.info("warm: prompts of %d tokens, %d graphs", prompt_tokens, len(self._graphs))

    def _warm_prefill(self, size: int) -> None:
        """Run prompts of `size` tokens and of fewer, beside the logits of all other prompts."""
        spare = [torch.empty(SMALL, dtype=torch.uint8, device=self.device) for _ in range(SPARE)]
        del spare  # what a longer prompt takes elsewhere, a shorter one may take of small blocks
        logits = self.prefill([0])
        held = [torch.zeros_like(logits) for _ in range(self.max_sequences - 1)]
        while size:
            logits = self.prefill([0] * size)
            size //= 2
        self._choose(torch.cat([logits, *held]), Sampler(temperature=1.0), [0.0] * self.max_sequences)

    def reset(self) -> None:
        """Forget all sequences."""
        for sequence in range(self.max_sequences):
            self._table.restart(sequence)

    def check(self, prompt_ids: Sequence[int], tokens: int) -> None:
        """ArgumentError unless so many tokens can follow the prompt."""
        check_prompt(prompt_ids, tokens, self.model.config.vocab, self.max_tokens, self._longest_prompt)

    @checked
    def prefill(self, ids: Sequence[int], sequence: int = 0) -> Tensor:
        """Begin a sequence with a prompt of T tokens -> logits (1, vocab) of what follows it."""
        self.check(ids, 0)
        self._table.restart(sequence)
        return self.run(*self.inputs(ids, [sequence], len(ids)))

    @checked
    def decode(self, ids: Sequence[int], sequences: Sequence[int] | None = None) -> Tensor:
        """One more token for each of some sequences -> logits (S, vocab) of what follows them.

        `sequences`: which, each once; None: the first ones, as many as there are `ids`. ArgumentError where
        a sequence has all the tokens that it may have.
        """
        chosen = range(len(ids)) if sequences is None else sequences
        for sequence in chosen:
            if self._table.length(sequence) == self.max_tokens:
                raise ArgumentError("ids", f"at most {self.max_tokens} tokens of a sequence", "one more")
        graph = self._graphs.get(len(ids))
        inputs = self.inputs(ids, chosen, 1, None if graph is None else self.width)
        return self.run(*inputs) if graph is None else graph(*inputs)

    @checked
    def generate(self, prompt_ids: Sequence[int], tokens: int, sampler: Sampler = GREEDY) -> list[int]:
        """The ids that follow a prompt: `tokens` of them, or fewer where the model ends the text before.

        The last one is then an end of text, as the model's config names it.
        """
        return [chosen[0] for chosen in self.stream([prompt_ids], tokens, sampler)]

    @checked
    def stream(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampler: Sampler = GREEDY
    ) -> Iterator[dict[int, int]]:
        """The next id of every prompt that has not ended, by its place in `prompts`; step by step.

        ArgumentError for more prompts than sequences, for ids outside of the vocabulary, for more tokens than
        a sequence may have, and for logits that are not finite.
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
        logits = torch.cat([self.prefill(prompt, place) for place, prompt in enumerate(prompts)])
        for step in range(tokens):
            ids = self._choose(logits, sampler, [next(numbers[place]) for place in going])
            if NOT_FINITE in ids:
                dtype = str(self.dtype).removeprefix("torch.")
                raise ArgumentError("dtype", "one in which the model's logits are finite", dtype)
            yield dict(zip(going, ids, strict=True))
            left = [(place, i) for place, i in zip(going, ids, strict=True) if i not in self.model.config.eos]
            if not left or step == tokens - 1:
                return
            going = [place for place, _ in left]
            logits = self.decode([i for _, i in left], going)

    def _choose(self, logits: Tensor, sampler: Sampler, numbers: Sequence[float]) -> list[int]:
        """The ids that rank 0 has chosen."""
        drawn = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)
        ids: list[int] = self._ranks.first(sampler.choose(logits, drawn)).tolist()
        return ids

    def inputs(
        self, ids: Sequence[int], sequences: Sequence[int], each: int, width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """`each` new tokens of some sequences: ids, positions, slots (3, T), and pages (S, P), on the host."""
        grown = [self._table.grow(sequence, each) for sequence in sequences]
        positions, slots = ([at for part in parts for at in part] for parts in zip(*grown, strict=True))
        return torch.tensor([list(ids), positions, slots]), torch.tensor(self._table.table(sequences, width))

    @torch.no_grad()
    def run(self, tokens: Tensor, pages: Tensor) -> Tensor:
        """A step of S sequences -> logits (S, vocab) after the last token of each."""
        ids, positions, slots = tokens.to(self.device)
        x = self.model.embed(ids)
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
        inputs = self.inputs([0] * count, range(count), 1, self.width)
        tokens, pages = (each.to(self.device) for each in inputs)
        self._graphs[count] = StepGraph(self.run, tokens, pages, next(iter(self._graphs.values()), None))


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
    wrong = next((each for each in prompt_ids if not 0 <= each < vocab), None)
    if wrong is not None:
        raise ArgumentError("prompt_ids", f"ids of a vocabulary of {vocab}: 0 to {vocab - 1}", str(wrong))
    most = max_tokens if longest is None else min(max_tokens, longest)
    if not 1 <= len(prompt_ids) <= most:
        raise ArgumentError("prompt_ids", f"1 to {most} ids", f"{len(prompt_ids)} ids")
    if tokens < 0 or len(prompt_ids) + tokens > max_tokens:
        most = max_tokens - len(prompt_ids)
        raise ArgumentError("tokens", f"0 to {most} after a prompt of {len(prompt_ids)}", str(tokens))
