"""Many loads read ahead are the loads one by one: same bits, same ledger, same errors."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from qload import (
    Heads,
    Load,
    MemoryStorage,
    SafetensorsStorage,
    Weights,
    devices,
    layers,
    load_layers,
    loader_from_config,
    open_checkpoint,
)
from qload.errors import ArgumentError, QloadError, StorageError
from qload.loader import Part, WeightsLoader
from qload.parallel import FakeWorld
from qload.spec import Weight
from qload.testing import assert_same_bits
from qload.testing import layers as random_layers
from qload.weights import prefetch, stream
from tests.example_counts import at_most, some
from tests.format_cases import CONFIGS, every_format, lawful
from tests.paths import FIXTURES

CHECKPOINTS = sorted(path.parent for path in FIXTURES.rglob("config.json"))
few = at_most(6)


def assert_same(made: Weight, want: Weight) -> None:
    assert (type(made), made.config, made.layer) == (type(want), want.config, want.layer)
    assert made.fields().keys() == want.fields().keys()
    for name, tensor in want.fields().items():
        assert_same_bits(made.fields()[name], tensor)


@pytest.fixture(params=["large", "small"])
def runs(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that hold tensors whole, and runs that cut them, with a window of a load or two."""
    if request.param == "small":
        monkeypatch.setattr(prefetch.HostStaging, "run", 1 << 10)
        monkeypatch.setattr(stream, "WINDOW_BYTES", 1 << 12)


def one_by_one(weights: Weights, prefixes: Sequence[str]) -> tuple[list[Weight], str | None]:
    made: list[Weight] = []
    try:
        for prefix in prefixes:
            made.append(weights.get_weights(prefix))
    except QloadError as error:
        return made, f"{type(error).__name__}: {error}"
    return made, None


def streamed(weights: Weights, prefixes: Sequence[str]) -> tuple[list[Weight], str | None]:
    made: list[Weight] = []
    try:
        for prefix, (asked, weight) in zip(prefixes, weights.stream(prefixes), strict=True):
            assert asked == prefix
            made.append(weight)
    except QloadError as error:
        return made, f"{type(error).__name__}: {error}"
    return made, None


def ways() -> Iterator[Any]:
    """Each checkpoint in every way: whole or cut, and as it is stored or for a kernel."""
    pairs = [("large", None), ("small", "auto"), ("large", "auto")]
    for place, folder in enumerate(CHECKPOINTS):
        name = str(folder.relative_to(FIXTURES))
        named = [pytest.param(folder, *pair, id=f"{name}-{pair[0]}-{pair[1]}") for pair in pairs]
        yield from some(named, 2, place)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(("folder", "runs", "target"), list(ways()), indirect=["runs"])
def test_every_fixture_is_loaded_as_one_by_one(folder: Path, target: Any) -> None:
    try:
        prefixes = [layer.prefix for layer in layers(folder)]
    except QloadError:
        pytest.skip("a checkpoint that is there to be refused")
    with open_checkpoint(folder, target=target) as one, open_checkpoint(folder, target=target) as other:
        want, made = one_by_one(one, prefixes), streamed(other, prefixes)

        assert made[1] == want[1]
        for a, b in zip(made[0], want[0], strict=True):
            assert_same(a, b)
        assert other.report() == one.report()


@pytest.mark.usefixtures("runs")
@every_format
@pytest.mark.parametrize("split", ["N", "K"])
@given(data=st.data())
@few
def test_shares_are_those_of_the_typed_loads(weight_type: type[Weight], split: Any, data: Any) -> None:
    stored = data.draw(random_layers(weight_type, CONFIGS[weight_type]))
    world = 2 if lawful(stored.config, split, getattr(stored, split), 2, stored.K) else 1
    for group in FakeWorld(world):
        weights = Weights(stored.storage(), loader=stored.loader(), process_group=group)
        want = stored.loader().load(weights, [Part("layer")], split)

        ((load, made),) = weights.stream([Load("layer", split)])

        assert load == Load("layer", split)
        assert_same(made, want)


def plain() -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(8, 4) for name in "qkv"} | {"qkv.weight": torch.randn(24, 4)}


def test_heads_blocks_and_several_prefixes_are_heard() -> None:
    (_, rank) = FakeWorld(2)
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None), process_group=rank)
    loads = [
        Load(["q", "k", "v"], "N"),
        Load(["q", "k", "v"], "N", heads=Heads(4, 2)),
        Load("qkv", "N", block_sizes=3),
    ]

    made = [weight for _, weight in weights.stream(loads)]

    assert_same(made[0], weights.get_multi_weights_col(["q", "k", "v"]))
    assert_same(made[1], weights.get_multi_weights_col(["q", "k", "v"], heads=Heads(4, 2)))
    assert_same(made[2], weights.get_weights_col_packed("qkv", 3))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    "asked",
    [
        {"prefixes": []},
        {"prefixes": ["a", "b"], "split": "K"},
        {"prefixes": "a", "heads": Heads(2)},
        {"prefixes": "a", "split": "N", "heads": Heads(2), "block_sizes": 2},
    ],
)
def test_a_load_that_means_nothing_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Load(**asked)


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
def test_a_file_that_is_cut_short_meanwhile_says_what_it_says_one_by_one(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"{i}.weight": torch.randn(64, 64) for i in range(8)}, path)
    prefixes = [str(i) for i in range(8)]
    with open_checkpoint(path) as one, open_checkpoint(path) as other:
        short = path.read_bytes()[: int(path.stat().st_size * keep)]
        path.write_bytes(short)

        want, made = one_by_one(one, prefixes), streamed(other, prefixes)

    assert want[1] is not None
    assert made[1] == want[1]
    assert len(made[0]) == len(want[0])


@pytest.mark.usefixtures("seen_texts")
def test_what_is_no_load_is_refused_in_its_turn_and_drops_no_other() -> None:
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))
    found = weights.stream(["q", None, "k"])  # type: ignore[list-item]

    assert next(found)[0] == "q"
    with pytest.raises(ArgumentError, match="loads"):
        next(found)


@pytest.mark.usefixtures("seen_texts")
def test_an_error_waits_for_its_turn() -> None:
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))
    found = weights.stream(["q", "nothing", "k"])

    assert next(found)[0] == "q"
    with pytest.raises(QloadError, match="nothing"):
        next(found)


def test_what_threads_cannot_read_the_load_reads_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("file", "unreadable", "not for threads")

    monkeypatch.setattr(prefetch.HostStaging, "fill", refuse)
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))

    ((_, made),) = weights.stream(["q"])

    assert_same(made, weights.get_weights("q"))


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"{i}.weight": torch.randn(512, 512) for i in range(4)}
    save_file(tensors, path)
    with SafetensorsStorage(path) as storage:
        weights = Weights(storage, loader=loader_from_config(None))
        made = dict(load_layers(weights))

        assert storage.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        assert_same_bits(made[name.removesuffix(".weight")].fields()["weight"], tensor)


def test_a_stream_that_is_left_lets_its_threads_go() -> None:
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))
    found = weights.stream(["q", "k", "v"])
    next(found)

    found.close()  # type: ignore[attr-defined]

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("qload-read")]


class OnlyLoads(WeightsLoader):
    """A loader of somebody's own, which knows of no plan, and what it was asked."""

    def __init__(self) -> None:
        self.inner, self.asked = loader_from_config(None), list[str]()

    def load(self, weights: Any, parts: Any, split: Any) -> Weight:
        self.asked += [part.prefix for part in parts]
        return self.inner.load(weights, parts, split)

    def shape(self, weights: Any, prefix: str) -> tuple[int, int]:
        return self.inner.shape(weights, prefix)


def test_a_loader_that_only_loads_is_streamed_too() -> None:
    weights = Weights(MemoryStorage(plain()), loader=OnlyLoads())

    ((_, made),) = weights.stream(["q"])

    assert_same(made, weights.get_weights("q"))


def test_the_loader_is_the_one_that_was_in_charge_when_it_was_asked() -> None:
    outer, inner = OnlyLoads(), OnlyLoads()
    weights = Weights(MemoryStorage(plain()), loader=outer)
    with weights.use_loader(inner):
        found = weights.stream(["q"])

    next(found)

    assert (outer.asked, inner.asked) == ([], ["q"])


def test_progress_ends_with_all_bytes() -> None:
    told: list[tuple[str, int, int]] = []
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))

    list(load_layers(weights, progress=lambda *each: told.append(each)))

    total = sum(tensor.nbytes for tensor in plain().values())
    assert told[0] == ("loading", 0, total)
    assert told[-1] == ("loading", total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_row_longer_than_a_run_is_read_by_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch.HostStaging, "run", 8)
    storage = MemoryStorage({"q.weight": torch.randn(4, 16)})
    with prefetch.Prefetcher(storage, torch.device("cpu")) as reader:
        begun = reader.begin([("q.weight", ())], storage)

        assert begun.take("q.weight", ()) is None


def test_a_fault_of_a_thread_is_told_and_the_load_reads_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(prefetch.HostStaging, "fill", fail)
    weights = Weights(MemoryStorage(plain()), loader=loader_from_config(None))

    ((_, made),) = weights.stream(["q"])

    assert_same(made, weights.get_weights("q"))
    assert "no such device" in caplog.text


def test_layers_of_one_shape_whose_facts_take_turns_are_told_apart() -> None:
    K, N, order = 64, 32, torch.arange(64, dtype=torch.int32) // 32
    tensors: dict[str, Tensor] = {}
    for i, index in enumerate([order, order.flip(0), order, order, order.flip(0)]):
        tensors |= {
            f"{i}.qweight": torch.randint(-(2**31), 2**31, (K // 8, N), dtype=torch.int32),
            f"{i}.qzeros": torch.full((2, N // 8), 0x77777777, dtype=torch.int32),
            f"{i}.scales": torch.rand(2, N).half(),
            f"{i}.g_idx": index,
        }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    storage = MemoryStorage(tensors)
    weights = Weights(storage, loader=loader_from_config(config, storage))

    made = dict(load_layers(weights))

    assert [weight.config.positional for weight in made.values()] == [True, False, True, True, False]
    for i, weight in made.items():
        assert_same_bits(weight.g_idx, tensors[f"{i}.g_idx"])


def test_facts_go_to_a_device_once_unless_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[Tensor] = []

    def place(fact: Tensor) -> Tensor:
        placed.append(fact)
        return fact + 100  # which marks what is on the device

    monkeypatch.setattr(devices, "stream_on", lambda device: 7)
    inner: Any = SimpleNamespace(device=torch.device("cuda"), place=place)
    facts, one = stream.PlacedFacts(inner), torch.arange(8)

    made = [facts.place(each) for each in (one, one[:], one.clone(), one.flip(0), one, one[::2], one[:4])]

    assert len(placed) == 5
    for got, want in zip(made, (one, one, one, one.flip(0), one, one[::2], one[:4]), strict=True):
        assert_same_bits(got, want + 100)
    assert len({tensor.data_ptr() for tensor in made}) == len(made)


def test_facts_stay_on_a_device_up_to_a_number_and_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[int] = []

    def place(fact: Tensor) -> Tensor:
        placed.append(len(fact))
        return fact.clone()

    monkeypatch.setattr(devices, "stream_on", lambda device: 7)
    monkeypatch.setattr(stream, "MAX_FACTS", 2)
    monkeypatch.setattr(stream, "MAX_FACT_BYTES", 64)
    inner: Any = SimpleNamespace(device=torch.device("cuda"), place=place)
    facts = stream.PlacedFacts(inner)

    for count in (8, 8, 9, 9, 4, 8, 4, 2, 8, 4):  # of 8 bytes each
        facts.place(torch.arange(count))
    facts.place(torch.arange(4, dtype=torch.int32))

    # 9 are too large to keep; a third kind, 2, takes the place of all others.
    assert placed == [8, 9, 9, 4, 2, 8, 4, 4]
    inner.device = torch.device("cpu")
    facts.place(torch.arange(4))
    assert placed[8:] == [4]


def test_layers_that_are_alike_share_their_facts_until_they_are_loaded() -> None:
    K, N = 64, 32
    tensors: dict[str, Tensor] = {}
    for i in range(2):
        tensors |= {
            f"{i}.qweight": torch.zeros(K // 8, N, dtype=torch.int32),
            f"{i}.qzeros": torch.full((2, N // 8), 0x77777777, dtype=torch.int32),
            f"{i}.scales": torch.rand(2, N).half(),
            f"{i}.g_idx": torch.arange(K, dtype=torch.int32) // 32,
        }
    storage = MemoryStorage(tensors)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    weights = Weights(storage, loader=loader_from_config(config, storage))

    first, second = (weights.loader.describe(weights, str(i)).facts["g_idx"] for i in range(2))
    one, other = (weights.get_weights(str(i)).fields()["g_idx"] for i in range(2))

    assert first.data_ptr() == second.data_ptr()
    assert len({tensor.data_ptr() for tensor in (first, one, other)}) == 3
