"""Layers that are alike are repacked as the first of them was; a layer that differs in anything is not."""

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import native
from qload.detect import loader_from_config
from qload.errors import ArgumentError
from qload.formats import GPTQWeight
from qload.kernel_formats import GPTQMarlinWeight, PanelsWeight, repack, repack_cache, restore
from qload.parallel import FakeWorld
from qload.repacking import RepackingLoader
from qload.spec import Weight
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights

pytestmark = pytest.mark.usefixtures("seen_texts")

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
K, N = 128, 256
MIDDLE = 0x77777777  # eight zero points of 8, stored minus one


def drawn(
    K: int = K, N: int = N, zeros: int = MIDDLE, scales: torch.dtype = torch.float16
) -> dict[str, Tensor]:
    return {
        "qweight": torch.randint(-(2**31), 2**31, (K // 8, N), dtype=torch.int32),
        "qzeros": torch.full((K // 32, N // 8), zeros, dtype=torch.int32),
        "scales": torch.rand(K // 32, N).to(scales),
        "g_idx": torch.arange(K, dtype=torch.int32) // 32,
    }


def opened(layers: Mapping[str, Mapping[str, Tensor]], target: Any = "marlin", **config: Any) -> Weights:
    tensors = {f"{name}.{field}": tensor for name, held in layers.items() for field, tensor in held.items()}
    storage = MemoryStorage(tensors)
    return Weights(storage, loader=loader_from_config({**CONFIG, **config}, storage, target=target))


def assert_same(made: Weight, want: Weight) -> None:
    assert (type(made), made.config, made.layer) == (type(want), want.config, want.layer)
    assert made.fields().keys() == want.fields().keys()
    for name, tensor in want.fields().items():
        assert_same_bits(made.fields()[name], tensor)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the layers that a recipe made, those aside that it was proven on."""
    names: list[str] = []
    inner = repack_cache.RepackCache.repack

    def told(self: repack_cache.RepackCache, weight: Weight, *asked: Any) -> Weight | None:
        made = inner(self, weight, *asked)
        if made is not None:
            names.append(weight.layer.name)
        return made

    monkeypatch.setattr(repack_cache.RepackCache, "repack", told)
    return names


def check(layers: Mapping[str, Mapping[str, Tensor]], target: str = "marlin", **config: Any) -> None:
    """Loaded one after another, each layer is what `repack` makes of it alone."""
    weights, stored = opened(layers, target, **config), opened(layers, None, **config)
    for name in layers:
        made, source = weights.get_weights(name), stored.get_weights(name)
        assert_same(made, repack(source, target))
        assert_same(restore(made), source)


has_native = pytest.mark.usefixtures("cpu_module")


@has_native
@pytest.mark.parametrize("target", ["marlin", "strips", "panels"])
@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
def test_the_second_of_a_kind_follows_the_first(
    followed: list[str], target: str, scales: torch.dtype
) -> None:
    check({name: drawn(scales=scales) for name in "abc"}, target)

    assert followed == ["b", "c"]


@has_native
@pytest.mark.parametrize("bits", [4, 8])
def test_one_group_and_eight_bits_follow_too(followed: list[str], bits: int) -> None:
    def layer() -> dict[str, Tensor]:
        word = MIDDLE if bits == 4 else 0x7F7F7F7F
        return {
            "qweight": torch.randint(-(2**31), 2**31, (K * bits // 32, N), dtype=torch.int32),
            "qzeros": torch.full((1, N * bits // 32), word, dtype=torch.int32),
            "scales": torch.rand(1, N).half(),
            "g_idx": torch.zeros(K, dtype=torch.int32),
        }

    check({name: layer() for name in "ab"}, bits=bits, group_size=-1)

    assert followed == ["b"]


@pytest.mark.parametrize("name", repack_cache.MOVED_TENSORS)
@pytest.mark.parametrize("target", ["marlin", "panels"])
def test_what_makes_another_weight_of_the_first_is_not_followed(
    followed: list[str], monkeypatch: pytest.MonkeyPatch, name: str, target: str
) -> None:
    inner = repack_cache._derive_moves

    def wrong(*asked: Any) -> Mapping[str, repack_cache.Move] | None:
        found = inner(*asked)
        if found is None:
            return None
        outermost, *others = sorted(found[name].digits, key=lambda digit: -digit.target)
        halved = outermost._replace(size=outermost.size // 2)
        return {**found, name: replace(found[name], digits=(halved, *others))}

    monkeypatch.setattr(repack_cache, "_derive_moves", wrong)
    check({each: drawn() for each in "ab"}, target)

    assert followed == []


@has_native
def test_each_shape_has_a_recipe_of_its_own(followed: list[str]) -> None:
    check({"a": drawn(), "b": drawn(K=256), "c": drawn(), "d": drawn(N=512), "e": drawn(K=256)})

    assert followed == ["c", "e"]


def differing() -> dict[str, dict[str, Tensor]]:
    ordered = drawn()
    act_order = {**drawn(), "g_idx": ordered["g_idx"][torch.randperm(K)]}
    bare = {name: tensor for name, tensor in drawn().items() if name != "g_idx"}
    one_zero = drawn()
    one_zero["qzeros"][1, 3] = 0x77767777
    return {
        "act order": act_order,
        "without an index": bare,
        "one zero point": one_zero,
        "zeros": drawn(zeros=0),
    }


@pytest.mark.parametrize("other", sorted(differing()))
@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_differs_is_repacked_by_itself(followed: list[str], other: str, first: bool) -> None:
    odd = differing()[other]
    check({"a": odd, "b": drawn(), "c": drawn()} if first else {"a": drawn(), "b": odd, "c": drawn()})

    assert "b" not in followed


@has_native
@pytest.mark.parametrize("target", ["marlin", "panels"])
@pytest.mark.parametrize(("K", "N"), [(128, 192), (160, 256), (128, 264)])
def test_padded_layers_are_repacked_by_themselves(followed: list[str], K: int, N: int, target: str) -> None:
    check({name: drawn(K=K, N=N) for name in "ab"}, target)

    padded = repack(opened({"a": drawn(K=K, N=N)}, None).get_weights("a"), target)
    assert isinstance(padded, GPTQMarlinWeight | PanelsWeight)
    assert (followed == []) == (padded.padded_shape != padded.shape)


@pytest.mark.parametrize("split", ["N", "K"])
def test_shares_are_those_of_each_layer_alone(split: str) -> None:
    layers = {name: drawn(K=256, N=512) for name in "abc"}
    for group in FakeWorld(2):
        weights, stored = opened(layers), opened(layers, None)
        weights.process_group = stored.process_group = group
        for name in layers:
            load = {"N": "get_weights_col", "K": "get_weights_row"}[split]
            assert_same(getattr(weights, load)(name), repack(getattr(stored, load)(name), "marlin"))


@has_native
def test_what_is_made_is_nobody_elses(followed: list[str]) -> None:
    layers = {name: drawn() for name in "ab"}
    weights = opened(layers)
    one, other = weights.get_weights("a"), weights.get_weights("b")

    before = other.dequantize()
    for tensor in one.fields().values():
        tensor.zero_()

    assert followed == ["b"]
    assert_same_bits(other.dequantize(), before)


@has_native
def test_whoever_writes_to_the_first_before_the_second_is_made_changes_no_other(followed: list[str]) -> None:
    layers = {name: drawn() for name in "abc"}
    weights, stored = opened(layers), opened(layers, None)
    for tensor in weights.get_weights("a").fields().values():
        tensor.zero_()

    for name in "bc":
        assert_same(weights.get_weights(name), repack(stored.get_weights(name), "marlin"))
    assert followed == ["b", "c"]


@has_native
@pytest.mark.parametrize("name", repack_cache.MOVED_TENSORS)
def test_tensors_that_lie_otherwise_in_memory_are_not_moved_as_the_first_ones(name: str) -> None:
    stored = opened({each: drawn() for each in "abc"}, None)
    first, second, third = (stored.get_weights(each) for each in "abc")
    known = repack_cache.RepackCache()
    known.record(first, "marlin", repack(first, "marlin"))
    made = known.repack(second, "marlin")
    turned = getattr(third, name).t().contiguous().t()

    assert made is not None
    assert_same(made, repack(second, "marlin"))
    assert known.repack(third.holding({name: turned}), "marlin") is None


@has_native
def test_the_memory_of_what_was_made_can_be_given_back(followed: list[str]) -> None:
    weights = opened({name: drawn() for name in "ab"})
    for name in "ab":
        weight: Any = weights.get_weights(name)
        weight.qweight.untyped_storage().resize_(0)
        weight.scales.untyped_storage().resize_(0)

    assert followed == ["b"]


@has_native
def test_a_layer_that_became_another_by_name_shows_no_way() -> None:
    stored = opened({each: drawn() for each in "ab"}, None)
    first, second = (stored.get_weights(each) for each in "ab")
    made, known = repack(first, "marlin"), repack_cache.RepackCache()
    known.record(first, "marlin", replace(made, layer=replace(made.layer, name="another")))

    assert known.repack(second, "marlin") is None


@has_native
def test_no_layer_is_kept_that_nobody_else_keeps() -> None:
    weights = opened({str(n): drawn(N=256 + 64 * n) for n in range(4)})
    kept = [weakref.ref(weights.get_weights(str(n)).qweight) for n in range(4)]
    gc.collect()

    assert [each() is None for each in kept] == [True] * 4


@has_native
def test_a_stream_keeps_one_layer_at_most_and_none_when_it_has_ended() -> None:
    weights = opened({str(n): drawn(N=256 + 64 * n) for n in range(4)})
    kept, most = list[Any](), 0
    for _, weight in weights.stream([str(n) for n in range(4)]):
        kept.append(weakref.ref(weight.fields()["qweight"]))
        del weight
        gc.collect()
        most = max(most, sum(each() is not None for each in kept))
    gc.collect()

    assert most == 1
    assert [each() is None for each in kept] == [True] * 4


def forgotten(weight: Any) -> None:
    weight.qweight.untyped_storage().resize_(0)


def emptied(weight: Any) -> None:
    weight.qweight.data = torch.empty(0, dtype=torch.int32)


def cast(weight: Any) -> None:
    weight.scales.data = weight.scales.data.float()


def zeroed(weight: Any) -> None:
    for tensor in weight.fields().values():
        tensor.zero_()


@pytest.mark.parametrize("how", [forgotten, emptied, cast, zeroed])
def test_what_its_owner_does_to_a_layer_of_a_stream_changes_no_other(how: Callable[[Any], None]) -> None:
    layers = {name: drawn() for name in "abcd"}
    stored = opened(layers, None)
    for name, weight in opened(layers).stream(list("abcd")):
        assert_same(weight, repack(stored.get_weights(name), "marlin"))
        how(weight)


def test_without_native_code_each_is_repacked_by_itself(followed: list[str]) -> None:
    with native.reference():
        check({name: drawn() for name in "ab"})

    assert followed == []


def test_so_many_kinds_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack_cache, "MAX_KINDS", 2)
    layers = {str(i): drawn(N=256 + 64 * (i % 4)) for i in range(8)}

    check(layers)


def test_large_layers_are_not_copied_for_a_proof(
    followed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repack_cache, "MAX_CODE_BYTES", drawn()["qweight"].nbytes - 1)

    check({name: drawn() for name in "ab"})

    assert followed == []


def test_a_weight_that_was_changed_after_its_load_is_read_again() -> None:
    weight = opened({"a": drawn()}, None).get_weights("a")
    assert isinstance(weight, GPTQWeight)
    assert weight.g_idx is not None
    lying = weight.holding({"g_idx": weight.g_idx.flip(0)})

    made = repack(lying, "marlin")

    assert isinstance(made, GPTQMarlinWeight)
    assert made.config.act_order
    assert_same_bits(made.dequantize(), lying.dequantize())


def test_a_loader_without_a_layout_that_is_known_says_so() -> None:
    storage = MemoryStorage({f"a.{name}": tensor for name, tensor in drawn().items()})
    inner = loader_from_config(CONFIG, storage)

    with pytest.raises(ArgumentError, match="layout"):
        Weights(storage, loader=RepackingLoader(inner, "nothing")).get_weights("a")


def test_a_recipe_for_half_of_a_tensor_is_not_right_where_memory_holds_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = opened({"a": drawn()}, None).get_weights("a")
    repacked = repack(weight, "marlin")
    recipe = repack_cache._derive_recipe(weight, repacked)  # type: ignore[arg-type]
    assert recipe is not None
    by_shape = {tuple(tensor.shape): tensor for tensor in repacked.fields().values()}
    monkeypatch.setattr(repack_cache, "_move_tensor", lambda source, move: by_shape[move.shape])

    answers = []
    for size in (1, 2):
        first, *others = recipe.moves["qweight"].digits
        digits = (first._replace(size=first.size // size), *others)
        moves = {**recipe.moves, "qweight": replace(recipe.moves["qweight"], digits=digits)}
        unproven = repack_cache.UnprovenRecipe(replace(recipe, moves=moves), weight, repacked)  # type: ignore[arg-type]
        answers.append(unproven.is_right())

    assert answers == [True, False]
