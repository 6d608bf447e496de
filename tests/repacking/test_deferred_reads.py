"""Codes and scales that stay in their file until it is known where they belong: equal weights and errors."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload.detect import loader_from_config
from qload.errors import NonfiniteScaleError, StorageError
from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack, repack_cache
from qload.parallel import FakeWorld
from qload.repacking import loaders
from qload.sentences import Digit
from qload.storage import MemoryStorage, SafetensorsStorage
from qload.weights import Weights, prefetch, stream
from tests.repacking.test_alike import CONFIG, MIDDLE, assert_same, drawn

pytestmark = pytest.mark.usefixtures("seen_texts")

has_native = pytest.mark.usefixtures("cpu_module")
Layers = Mapping[str, Mapping[str, Tensor]]


@pytest.fixture(autouse=True)
def small_codes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "MIN_CODE_BYTES", 1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each tensor that was to go straight from the file, codes or scales, whether it went."""
    found: list[bool] = []
    inner = loaders.DeferredTensors._move

    def told(self: loaders.DeferredTensors, *asked: Any) -> Any:
        made = inner(self, *asked)
        found.append(made is not None)
        return made

    monkeypatch.setattr(loaders.DeferredTensors, "_move", told)
    return found


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codes that were left in their file for later, of each layer that was made without them."""
    found: list[str] = []
    inner = loaders.DeferredTensors.load

    def told(self: loaders.DeferredTensors, *asked: Any) -> Any:
        found.append(self.tensors[loaders.CODES].slices.name)
        return inner(self, *asked)

    monkeypatch.setattr(loaders.DeferredTensors, "load", told)
    return found


def saved(path: Path, layers: Layers) -> Path:
    file = path / "model.safetensors"
    save_file(
        {f"{name}.{field}": each for name, held in layers.items() for field, each in held.items()}, file
    )
    return file


@contextmanager
def opened(file: Path, target: Any = "marlin", group: Any = None) -> Iterator[Weights]:
    with SafetensorsStorage(file) as storage:
        loader = loader_from_config(CONFIG, storage, target=target)
        yield Weights(storage, loader=loader, process_group=group)


def late_bytes() -> int:
    """Those of a layer that may go straight from its file."""
    return sum(drawn()[name].nbytes for name in repack_cache.MOVED_TENSORS)


def check(file: Path, names: str, target: Any = "marlin", group: Any = None) -> None:
    """Streamed, and one by one, layers are what each is in a checkpoint of its own."""
    alone = []
    for name in names:
        with opened(file, target, group) as weights:
            alone.append(weights.get_weights(name))
    with opened(file, target, group) as one, opened(file, target, group) as other:
        for streamed, name, want in zip(other.stream(list(names)), names, alone, strict=True):
            assert_same(one.get_weights(name), want)
            assert_same(streamed[1], want)
        assert one.report() == other.report()
        assert one.report().complete
        assert isinstance(other.storage, SafetensorsStorage)
        sizes = {name: other.info(name).nbytes for name in list(other.storage.keys())}
        compared = sum(sizes[f"{name}.qzeros"] for name in names)  # read once before, for sym of the config
        assert other.storage.bytes_read == sum(sizes.values()) + compared


@has_native
@pytest.mark.parametrize("target", ["marlin", "strips", "panels", "auto"])
def test_all_but_the_first_of_a_kind_go_straight(tmp_path: Path, moved: list[bool], target: str) -> None:
    check(saved(tmp_path, {name: drawn() for name in "abcd"}), "abcd", target)

    assert moved == [True] * 12  # codes and scales, three layers of the stream, and three one by one


@has_native
def test_each_kind_has_a_first(tmp_path: Path, moved: list[bool]) -> None:
    layers = {
        "a": drawn(),
        "b": drawn(K=256),
        "c": drawn(),
        "d": drawn(scales=torch.bfloat16),
        "e": drawn(K=256),
    }

    check(saved(tmp_path, layers), "abcde")

    assert moved == [True] * 8


@pytest.mark.parametrize("nonfinite", ["error", "allow"])
@pytest.mark.parametrize("scale", [1.0, torch.nan])
def test_a_layer_whose_moved_scales_are_not_finite_is_loaded_again(nonfinite: Any, scale: float) -> None:
    stored = GPTQWeight(config=GPTQConfig(4, 32), **drawn())
    moved = repack(stored, "marlin")
    moved.scales.fill_(scale)
    given_up: list[Any] = []
    cache = SimpleNamespace(repack=lambda *_: moved)
    kinds: Any = SimpleNamespace(cache=cache, drop=lambda *told: given_up.append(told))
    source = Weights(MemoryStorage({}), loader=loader_from_config(CONFIG), nonfinite=nonfinite)

    made = loaders.DeferredTensors(kinds, "kind", "marlin", {}).load(source, lambda _: stored)

    refused = nonfinite == "error" and scale != 1
    assert (made is None, bool(given_up)) == (refused, refused)


@has_native
@pytest.mark.parametrize("streamed", [False, True])
def test_a_scale_that_is_not_finite_is_refused_where_it_goes_straight(
    tmp_path: Path, moved: list[bool], streamed: bool
) -> None:
    layers = {name: drawn() for name in "abc"}
    layers["c"]["scales"][1, 5] = torch.inf

    file = saved(tmp_path, layers)
    with (
        opened(file) as weights,
        pytest.raises(NonfiniteScaleError, match=r"^c\.scales: .*\n.*\n.*inf at \(1, 5\)"),
    ):
        assert [*(weights.stream(list("abc")) if streamed else map(weights.get_weights, "abc"))]

    assert moved == [True] * 4  # codes and scales of two layers


def odd() -> Iterator[Any]:
    order = torch.arange(128).flip(0).int() // 32
    zero = drawn()["qzeros"].index_fill(0, torch.tensor([1]), MIDDLE - 1)
    yield pytest.param({"qzeros": zero}, id="one row of zero points")
    yield pytest.param({"g_idx": order}, id="act order")


@pytest.mark.parametrize("other", list(odd()))
def test_a_layer_that_only_looks_alike_is_loaded_with_its_codes(tmp_path: Path, other: Any) -> None:
    layers = {"a": drawn(), "b": {**drawn(), **other}, "c": drawn(), "d": drawn()}
    file = saved(tmp_path, layers)
    with opened(file, None) as stored:
        want = {name: stored.get_weights(name) for name in layers}
    with opened(file) as weights:
        made = dict(weights.stream(list("abcd")))
        report = weights.report()

    for name, weight in made.items():
        assert torch.equal(weight.dequantize(), want[name].dequantize())
    assert report.complete
    assert not report.twice


@has_native
def test_where_one_was_not_as_expected_those_after_it_are_read_ahead(
    tmp_path: Path, moved: list[bool], tried: list[str]
) -> None:
    other = {**drawn(), "qzeros": drawn()["qzeros"] - 1}
    with opened(saved(tmp_path, {"a": drawn(), "b": other, "c": drawn()})) as weights:
        for name in "abc":
            weights.get_weights(name)

    assert tried == ["b.qweight"]
    assert moved == []


@has_native
def test_scales_that_are_not_moved_in_pieces_are_read_ahead_from_then_on(
    tmp_path: Path, moved: list[bool], tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that showed it is loaded once more; codes of the next ones go straight as before."""
    inner = prefetch.devices.move_from_file

    def codes_alone(source: Any, target: Tensor, bits: int, digits: Any) -> bool:
        return bits == 4 and inner(source, target, bits, digits)

    monkeypatch.setattr(prefetch.devices, "move_from_file", codes_alone)
    file = saved(tmp_path, {name: drawn() for name in "abcd"})
    with opened(file) as one, opened(file, None) as stored:
        for name in "abcd":
            assert_same(one.get_weights(name), repack(stored.get_weights(name), "marlin"))
        assert one.report().complete
        assert not one.report().twice

    assert tried == ["b.qweight", "c.qweight", "d.qweight"]
    assert moved == [True, False, True, True]


@has_native
def test_scales_that_no_thread_could_move_keep_no_codes_from_going_straight(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, ahead = prefetch.devices.move_from_file, prefetch.NativeReader.begin
    monkeypatch.setattr(
        prefetch.devices, "move_from_file", lambda at, out, bits, to: bits == 4 and inner(at, out, bits, to)
    )

    def codes_alone(self: prefetch.NativeReader, asked: Any) -> Any:
        """Scales by digits that name more bytes than there are, which no thread moves."""
        twice = [
            move._replace(digits=(*move.digits, Digit(2, 0, 0))) if move.digits and move.bits != 4 else move
            for move in asked
        ]
        return ahead(self, twice)

    monkeypatch.setattr(prefetch.NativeReader, "begin", codes_alone)
    monkeypatch.setattr(stream, "WINDOW_BYTES", 2 * late_bytes())
    file = saved(tmp_path, {name: drawn() for name in "abcdefgh"})
    with opened(file) as one, opened(file, None) as stored:
        for name, weight in one.stream(list("abcdefgh")):
            assert_same(weight, repack(stored.get_weights(name), "marlin"))

    assert tried == [f"{name}.qweight" for name in "bcdefgh"]


@has_native
@pytest.mark.parametrize("split", ["N", "K"])
def test_shares_of_several_ranks_are_read_as_ever(tmp_path: Path, tried: list[str], split: str) -> None:
    file = saved(tmp_path, {name: drawn(K=256, N=512) for name in "ab"})
    load = {"N": "get_weights_col", "K": "get_weights_row"}[split]
    for group in FakeWorld(2):
        with opened(file, group=group) as weights:
            for name in "ab":
                getattr(weights, load)(name)

    assert tried == []


@has_native
@pytest.mark.parametrize(
    ("place", "size", "change"),
    [(loaders, "MIN_CODE_BYTES", 1), (repack_cache, "MAX_CODE_BYTES", -1)],
    ids=["LEAST", "LARGE"],
)
def test_codes_of_other_sizes_are_read_as_ever(
    tmp_path: Path, moved: list[bool], place: Any, size: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, size, drawn()["qweight"].nbytes + change)

    check(saved(tmp_path, {name: drawn() for name in "abc"}), "abc")

    assert moved == []


@has_native
@pytest.mark.parametrize(
    ("place", "size"),
    [(loaders, "MIN_CODE_BYTES"), (repack_cache, "MAX_CODE_BYTES")],
    ids=["least", "large"],
)
def test_codes_of_the_first_and_the_last_size_go_straight(
    tmp_path: Path, moved: list[bool], place: Any, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, size, drawn()["qweight"].nbytes)

    check(saved(tmp_path, {name: drawn() for name in "abc"}), "abc")

    assert moved == [True] * 8


@has_native
def test_no_more_kinds_are_expected_than_are_remembered(
    tmp_path: Path, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_cache, "MAX_KINDS", 1)
    layers = {"a": drawn(), "b": drawn(K=256), "c": drawn(K=256), "d": drawn()}
    with opened(saved(tmp_path, layers)) as weights:
        for name in layers:
            weights.get_weights(name)

    assert tried == ["d.qweight"]


@has_native
def test_a_storage_of_somebody_elses_is_asked_for_all(tmp_path: Path, moved: list[bool]) -> None:
    class Own(SafetensorsStorage):
        pass

    file = saved(tmp_path, {name: drawn() for name in "ab"})
    with Own(file) as storage:
        weights = Weights(storage, loader=loader_from_config(CONFIG, storage, target="marlin"))
        list(weights.stream(list("ab")))

    assert moved == []


@has_native
@pytest.mark.parametrize("keep", [0.4, 0.6, 0.99])
def test_a_file_that_is_cut_short_meanwhile_says_so_in_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: float
) -> None:
    monkeypatch.setattr(
        stream, "WINDOW_BYTES", 1
    )  # so that no layer is read before the one before it is there
    file = saved(tmp_path, {name: drawn() for name in "abcd"})
    with opened(file) as weights:
        found = weights.stream(list("abcd"))
        next(found)
        short = file.read_bytes()[: int(file.stat().st_size * keep)]
        file.write_bytes(short)

        with pytest.raises(StorageError, match="had"):
            list(found)


@has_native
def test_codes_that_wait_in_their_file_count_as_read_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[bool] = []
    inner = loaders.DeferredKinds.plan

    def told(self: loaders.DeferredKinds, *asked: Any) -> Any:
        found = inner(self, *asked)
        planned.append(found is not None)
        return found

    monkeypatch.setattr(loaders.DeferredKinds, "plan", told)
    monkeypatch.setattr(stream, "WINDOW_BYTES", 3 * late_bytes())
    with opened(saved(tmp_path, {name: drawn() for name in "abcdef"})) as weights:
        next(weights.stream(list("abcdef")))

    assert planned == [False, True, True]
