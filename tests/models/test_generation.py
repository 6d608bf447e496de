"""Prompts are continued as one pass over the whole text says, whatever the pages; memory stays as it is."""

import weakref
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from qload import ArgumentError, FakeWorld
from qload.models import Decoder, Engine, PagedCache, Sampler, Step, generation, load_model
from qload.models.generation import StepOutput, prompt_sizes
from qload.models.kv_cache import PADDING_PAGE
from qload.parallel import ALONE, ProcessGroup
from tests.models import drawn

pytestmark = pytest.mark.usefixtures("seen_texts")

PROMPT = [3, 1, 4, 1, 5]
VOCAB, POSITIONS = (drawn.SIZES[key] for key in ("vocab_size", "max_position_embeddings"))
DRAWN = Sampler(temperature=1.0, top_k=20, top_p=0.95, seed=3)


def tiny(group: ProcessGroup = ALONE, kind: str = "llama", **said: Any) -> Decoder:
    """A tiny model, or a rank's share of it, whose texts do not end unless that is `said`."""
    config = drawn.config(kind, **{"eos_token_id": None, **said})
    return load_model(drawn.weights(config, drawn.tensors(config), group), config)


def whole(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits (1, vocab) after the last of `ids`, all of them in one pass."""
    cache = PagedCache.of(model.config, pages=1, page_size=POSITIONS, dtype=torch.float32)
    step = Step.of([0], tokens=len(ids), pages=[[0]], page_size=POSITIONS)
    logits: torch.Tensor = model(torch.tensor(ids), step, cache)[-1:]
    return logits


def written(model: Any, prompt: list[int], tokens: int, sampler: Sampler, sequence: int = 0) -> list[int]:
    """What follows a prompt, each token by a pass over the whole text."""
    ids, numbers = list(prompt), sampler.numbers(sequence)
    for _ in range(tokens):
        u = torch.tensor([next(numbers)], dtype=torch.float64)
        ids.append(int(sampler.choose(whole(model, ids), u)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("sampler", [Sampler(), DRAWN], ids=["greedy", "drawn"])
def test_a_prompt_is_continued_as_passes_over_the_whole_text_say(page_size: int, sampler: Sampler) -> None:
    model = tiny()
    engine = Engine(model, max_tokens=20, page_size=page_size)

    assert engine.generate(PROMPT, 15, sampler) == written(model, PROMPT, 15, sampler)


@pytest.mark.parametrize("kind", drawn.OWN)
def test_windows_chunks_sinks_and_heads_of_two_sizes_are_the_same_token_by_token(kind: str) -> None:
    model = tiny(kind=kind)
    engine = Engine(model, max_tokens=14, page_size=3)

    assert engine.generate(PROMPT, 9) == written(model, PROMPT, 9, Sampler())


@pytest.mark.parametrize("sampler", [Sampler(), DRAWN], ids=["greedy", "drawn"])
def test_prompts_at_once_are_continued_as_each_alone(sampler: Sampler) -> None:
    model, prompts = tiny(), [PROMPT, [7], list(range(12))]
    engine = Engine(model, max_tokens=24, max_sequences=3, page_size=4)

    steps = list(engine.stream(prompts, 10, sampler))

    for place, prompt in enumerate(prompts):
        assert [step[place] for step in steps] == written(model, prompt, 10, sampler, sequence=place)


def test_a_text_ends_with_its_end_while_the_others_go_on() -> None:
    model, prompts = tiny(), [PROMPT, [7]]
    first, other = (written(model, prompt, 6, Sampler()) for prompt in prompts)
    end = next(token for token in first[:5] if token not in other)
    ended = Engine(tiny(eos_token_id=[99, end]), max_tokens=12, max_sequences=2, page_size=2)

    steps = list(ended.stream(prompts, 6))

    assert [step[0] for step in steps if 0 in step] == first[: first.index(end) + 1]
    assert [step[1] for step in steps] == other
    assert ended.generate(PROMPT, 6) == first[: first.index(end) + 1]


@pytest.mark.parametrize("sampler", [Sampler(), DRAWN], ids=["greedy", "drawn"])
def test_an_engine_that_runs_ahead_of_the_host_writes_the_same(sampler: Sampler) -> None:
    """As on a GPU: a step is begun before the host knows who has ended."""
    prompts = [PROMPT, [7], [2, 2]]
    alone = list(Engine(tiny(), max_tokens=20, max_sequences=3).stream(prompts, 8, sampler))
    model = tiny(eos_token_id=[alone[3][1], alone[5][0]])
    engine, ahead = (Engine(model, max_tokens=20, max_sequences=3, page_size=2) for _ in range(2))
    ahead.runs_ahead = True

    steps = list(ahead.stream(prompts, 8, sampler))

    assert steps == list(engine.stream(prompts, 8, sampler))
    assert len({len(step) for step in steps}) > 1
    assert ahead.generate(PROMPT, 8, sampler) == engine.generate(PROMPT, 8, sampler)


class Eager:
    """Stand-in of a graph: runs its step at each call; `sizes`: the tokens of each call."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, step: Any, inputs: Any, other: Any) -> None:
        self.step, self.shapes = step, [each.shape for each in inputs]
        step(*inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        assert [each.shape for each in inputs] == self.shapes
        self.sizes.append(len(inputs[0]))
        return self.step(*inputs)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(generation, "StepGraph", Eager)
    monkeypatch.setattr(generation, "MIN_GRAPH_TOKENS", 4)
    monkeypatch.setattr(generation, "MAX_GRAPH_TOKENS", 12)
    monkeypatch.setattr(Eager, "sizes", found := [])
    return found


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", drawn.OWN)
def test_a_prompt_in_a_graph_of_more_tokens_is_continued_as_without_one(
    kind: str, page_size: int, eager: list[int]
) -> None:
    model = tiny(kind=kind)
    engine = Engine(model, max_tokens=14, max_sequences=2, page_size=page_size, graphs=True)
    engine.warm_up(13)
    dense = not model.config.sparse_layers
    for length, size in ((1, 1), (2, 4), (4, 4), (5, 6), (9, 12), (13, 0)):
        eager.clear()
        prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9][:length]
        assert engine.generate(prompt, 1) == written(model, prompt, 1, Sampler())
        assert eager == [each for each in [size] if each and (dense or each == 1)]
        for cells in (engine.cache.keys, engine.cache.values):
            assert not cells[:, PADDING_PAGE].any()


@pytest.mark.parametrize(
    ("longest", "sizes"),
    [
        (63, []),
        (64, [64]),
        (100, [64, 96, 100]),
        (512, [64, 96, 128, 192, 256, 384, 512]),
        (1025, [64, 96, 128, 192, 256, 384, 512, 768, 1024]),
    ],
)
def test_a_graph_has_at_most_half_more_tokens_than_the_one_before(longest: int, sizes: list[int]) -> None:
    assert prompt_sizes(tiny().config, longest) == sizes
    assert prompt_sizes(replace(tiny().config, sparse_layers=frozenset({1})), longest) == []


def test_rows_of_what_a_step_made_keep_the_ids_that_its_graph_chose() -> None:
    logits = torch.arange(6).view(3, 2)
    some = StepOutput(logits, torch.tensor([7, 8, 9])).of_rows([2, 0])

    assert some.logits.tolist() == [[4, 5], [0, 1]]
    assert some.argmax is not None
    assert some.argmax.tolist() == [9, 7]
    assert StepOutput(logits).of_rows([1]).argmax is None


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_the_model_write_what_one_writes(world: int) -> None:
    want = written(tiny(), PROMPT, 8, DRAWN)

    def work(group: Any) -> list[int]:
        return Engine(tiny(group), max_tokens=16, page_size=4).generate(PROMPT, 8, DRAWN)

    assert FakeWorld(world).run(work) == [want] * world


def test_every_rank_takes_the_token_of_the_first() -> None:
    def work(group: Any) -> list[int]:
        sampler = Sampler(temperature=5.0, seed=group.rank())  # each draws another
        return Engine(tiny(group), max_tokens=16).generate(PROMPT, 8, sampler)

    first, second = FakeWorld(2).run(work)

    assert first == second == written(tiny(), PROMPT, 8, Sampler(temperature=5.0))


def test_a_sequence_that_begins_again_sees_nothing_of_what_was_there() -> None:
    model = tiny()
    engine = Engine(model, max_tokens=20, page_size=4)
    engine.generate([9] * 12, 8)

    assert engine.generate(PROMPT, 8) == written(model, PROMPT, 8, Sampler())


def test_what_overflowed_in_a_sequence_harms_no_later_one() -> None:
    model = tiny()
    model.embed_tokens.weight[9] = float("nan")
    engine = Engine(model, max_tokens=20, max_sequences=2, page_size=4)
    with pytest.raises(ArgumentError, match="finite"):
        engine.generate([9] * 12, 8)

    steps = list(engine.stream([PROMPT, [7]], 8))
    assert [step[0] for step in steps] == written(model, PROMPT, 8, Sampler())
    assert [step[1] for step in steps] == written(model, [7], 8, Sampler())


def test_chosen_sequences_go_on_while_others_wait() -> None:
    model = tiny()
    engine = Engine(model, max_tokens=20, max_sequences=3, page_size=2)
    logits = [engine.prefill(PROMPT, sequence) for sequence in range(3)]
    engine.decode([8, 9], [2, 0])

    alone = Engine(model, max_tokens=20, page_size=2)
    alone.prefill(PROMPT)
    alone.decode([8])

    assert all(each.equal(logits[0]) for each in logits)
    assert engine.decode([6], [2]).argmax() == alone.decode([6]).argmax()
    assert engine.decode([6], [1]).argmax() == whole(model, [*PROMPT, 6]).argmax()


class Allocations(TorchFunctionMode):
    """Bytes of the storages that torch's functions make: how many are held, and the most that were.

    Those of the engine's model and cache, which operators return views of, are no new ones.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.held = self.most = 0
        there = [*engine.model.parameters(), *engine.model.buffers(), *engine.cache.buffers()]
        self._known = {each.untyped_storage()._cdata for each in there}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else [made]:
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.held += storage.nbytes()
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.held -= nbytes


@pytest.mark.parametrize("ahead", [False, True])
def test_after_the_warm_up_no_step_takes_more_memory(ahead: bool) -> None:
    engine = Engine(tiny(), max_tokens=24, max_sequences=3, page_size=4)
    engine.runs_ahead = ahead
    with Allocations(engine) as count:
        engine.warm_up(prompt_tokens=20)
        most, held = count.most, count.held
        for length in (20, 1, 7):
            for _ in engine.stream([[1] * length] * 3, 4, DRAWN):
                assert count.most == most
        assert count.held <= held


def test_without_a_warm_up_the_longest_prompt_takes_more_than_a_shorter_one() -> None:
    """The count that the test above stands on can tell."""
    engine = Engine(tiny(), max_tokens=32, page_size=4)
    with Allocations(engine) as count:
        engine.generate([1] * 3, 4)
        before = count.most
        engine.generate([1] * 20, 4)

        assert count.most > before


def test_a_warm_engine_writes_what_a_cold_one_writes_and_refuses_longer_prompts() -> None:
    model = tiny()
    engine = Engine(model, max_tokens=20, max_sequences=2, page_size=4)
    engine.warm_up(prompt_tokens=5)

    assert engine.generate(PROMPT, 8) == written(model, PROMPT, 8, Sampler())
    with pytest.raises(ArgumentError, match=r"expected 1 to 5 ids\n  got      6 ids"):
        engine.generate([*PROMPT, 1], 1)


def test_logits_that_are_not_finite_are_refused_with_the_dtype() -> None:
    model = tiny()
    model.norm.weight.fill_(float("inf"))

    with pytest.raises(ArgumentError, match=r"^dtype\n.*finite\n  got      float32"):
        Engine(model, max_tokens=8).generate(PROMPT, 1)


@pytest.mark.parametrize(
    ("prompt", "tokens", "said"),
    [
        pytest.param([1, 40], 1, ("ids", "ids of a vocabulary of 40: 0 to 39", "40"), id="too high"),
        pytest.param([-1], 1, ("ids", "ids of a vocabulary of 40: 0 to 39", "-1"), id="too low"),
        pytest.param([], 1, ("prompt_ids", "1 to 8 ids", "0 ids"), id="no prompt"),
        pytest.param([1] * 9, 0, ("prompt_ids", "1 to 8 ids", "9 ids"), id="a long prompt"),
        pytest.param([1] * 5, 4, ("tokens", "0 to 3 after a prompt of 5", "4"), id="many tokens"),
        pytest.param([1], -1, ("tokens", "0 to 7 after a prompt of 1", "-1"), id="fewer than none"),
    ],
)
def test_what_cannot_be_continued_is_refused_before_the_first_step(
    prompt: list[int], tokens: int, said: tuple[str, str, str]
) -> None:
    with pytest.raises(ArgumentError) as refused:
        Engine(tiny(), max_tokens=8).generate(prompt, tokens)

    error = refused.value
    assert (error.argument, error.expected, error.got) == said


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 8, "max_sequences": 0}, "max_sequences"),
        ({"max_tokens": 8, "page_size": 0}, "page_size"),
    ],
)
def test_sizes_that_are_none_are_refused_by_name(sizes: dict[str, int], name: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{name}\n"):
        Engine(tiny(), **sizes)


def test_more_prompts_than_sequences_and_more_tokens_than_fit_are_refused() -> None:
    engine = Engine(tiny(), max_tokens=len(PROMPT))
    with pytest.raises(ArgumentError, match=r"^prompts\n  expected 1 to 1\n  got      2"):
        engine.stream([PROMPT, PROMPT], 0)
    with pytest.raises(ArgumentError, match=r"^prompt_tokens\n"):
        engine.warm_up(len(PROMPT) + 1)
    engine.prefill(PROMPT)
    with pytest.raises(ArgumentError, match=r"^ids\n  expected at most 5 tokens per sequence"):
        engine.decode([1])


@pytest.mark.parametrize(
    ("ids", "sequences", "name"),
    [
        pytest.param([1], [2], "sequences", id="one that there is not"),
        pytest.param([1, 1], [0, 0], "sequences", id="one twice"),
        pytest.param([1], [0, 1], "sequences", id="more than ids"),
        pytest.param([1], [-1], "sequences", id="negative"),
        pytest.param([], None, "sequences", id="none"),
        pytest.param([40], [0], "ids", id="outside of the vocabulary"),
    ],
)
def test_a_step_of_other_sequences_is_refused_and_changes_nothing(
    ids: list[int], sequences: list[int] | None, name: str
) -> None:
    model = tiny()
    engine = Engine(model, max_tokens=8, max_sequences=2)
    engine.prefill(PROMPT)

    with pytest.raises(ArgumentError, match=rf"^{name}\n"):
        engine.decode(ids, sequences)

    assert engine.decode([6]).argmax() == whole(model, [*PROMPT, 6]).argmax()
