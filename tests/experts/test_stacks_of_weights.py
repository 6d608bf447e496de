"""A stack on its own: filled once, moved, repacked and taken back; what fits no stack is refused by name."""

from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qload import ExpertsWeight, FakeWorld, GPTQConfig, GPTQWeight, Stack, loader_from_config, repack, restore
from qload.errors import ArgumentError, MismatchError, RepackError, ShapeError
from qload.experts.weight import Stacking, stacked
from qload.kernel_formats import LAYOUTS
from qload.layouts import STORED_MINUS_ONE, gptq
from qload.spec import Weight
from qload.testing import assert_same_bits
from tests.experts.expert_layers import FACTS, NAMES, PREFIX, StoredExperts, ranks, stored_plain

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}


def layer(N: int, K: int, seed: int, act_order: bool = False) -> GPTQWeight:
    make = torch.Generator().manual_seed(seed)
    index = torch.arange(K) // 32
    return GPTQWeight(
        config=GPTQConfig(4, 32),
        qweight=gptq.rows(4).pack(torch.randint(16, (K, N), generator=make)),
        qzeros=STORED_MINUS_ONE.write(torch.randint(1, 16, (K // 32, N), generator=make), gptq.columns(4)),
        scales=torch.rand(K // 32, N, generator=make).half(),
        g_idx=(index[torch.randperm(K, generator=make)] if act_order else index).int(),
    )


def stored_gptq(count: int = 3, inner: int = 128, hidden: int = 64, act_order: bool = False) -> StoredExperts:
    tensors: dict[str, Tensor] = {}
    for expert in range(count):
        for at, name in enumerate(NAMES):
            N, K = (hidden, inner) if at == 2 else (inner, hidden)
            made = layer(N, K, 10 * expert + at, act_order).fields()
            if at == 1:
                made["g_idx"] = tensors[f"{PREFIX}.{expert}.gate_proj.g_idx"]
            tensors |= {f"{PREFIX}.{expert}.{name}.{field}": tensor for field, tensor in made.items()}
    return StoredExperts([], tensors, loader_from_config(GPTQ))


def assert_same_stack(got: Stack, want: Stack) -> None:
    assert (got.weight_type, got.config, got.layer) == (want.weight_type, want.config, want.layer)
    assert got.names == want.names
    assert got.fields().keys() == want.fields().keys()
    for field, tensor in want.fields().items():
        assert_same_bits(got.fields()[field], tensor)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("layout", ["marlin", "exllama", "strips", "panels", "gptq_v2"])
def test_every_expert_is_repacked_as_alone_and_taken_back(layout: str, act_order: bool) -> None:
    made = stored_gptq(act_order=act_order).load()

    moved = made.repack(layout)

    assert layout in LAYOUTS
    for got, own in ((moved.gate_up, made.gate_up), (moved.down, made.down)):
        assert got.format != own.format or layout == "gptq_v2"
        for expert in range(3):
            want = repack(own.expert(expert), layout)
            assert (type(want), want.config, want.layer) == (
                got.weight_type,
                got.config,
                got.expert(expert).layer,
            )
            for field, tensor in want.fields().items():
                assert_same_bits(got.fields()[field][expert], tensor)
            assert_same_bits(got.dequantize(expert), own.dequantize(expert))
    back = moved.restore()
    assert_same_stack(back.gate_up, made.gate_up)
    assert_same_stack(back.down, made.down)
    assert_same_bits(restore(moved.down.expert(2)).fields()["qweight"], made.down.fields()["qweight"][2])


@pytest.mark.parametrize("split", [None, "tensor", "experts"])
@pytest.mark.parametrize("target", ["marlin", "exllama"])
def test_a_loader_that_repacks_gives_the_stacks_that_repack_gives(target: Any, split: Any) -> None:
    stored = stored_gptq()
    repacking = replace(stored, loader=loader_from_config(GPTQ, target=target))
    whole = stored.load()
    for group in FakeWorld(2):
        got = repacking.load(group, split=split)

        want = stored.load(group, split=split).repack(target, whole=whole if split == "tensor" else None)

        assert_same_stack(got.gate_up, want.gate_up)
        assert_same_stack(got.down, want.down)
        assert got.gate_up.format == repack(layer(64, 64, 0), target).format


@pytest.mark.usefixtures("seen_texts")
def test_what_a_layout_cannot_say_is_refused_by_name() -> None:
    with pytest.raises(RepackError, match="has no codes to repack") as caught:
        stored_plain(2).load().repack("marlin")
    assert caught.value.source == f"{PREFIX}.0.gate_proj, {PREFIX}.0.up_proj: unquantized"
    with pytest.raises(ArgumentError, match="layout"):
        stored_gptq().load().repack("no such layout")


def test_zero_points_that_a_layout_leaves_out_of_one_expert_are_not_left_out_of_all() -> None:
    stored = stored_gptq()
    middle = STORED_MINUS_ONE.write(torch.full((4, 64), 8), gptq.columns(4))
    stored.tensors[f"{PREFIX}.1.down_proj.qzeros"] = middle

    with pytest.raises(MismatchError, match="differ in config") as caught:
        stored.load().repack("marlin")

    assert caught.value.tensor == f"{PREFIX}.1.down_proj"


def test_groups_in_act_order_of_a_share_of_inputs_are_known_for_each_matrix() -> None:
    for act_order in (False, True):
        stored = stored_gptq(act_order=act_order)
        for part in ranks(2, lambda group, stored=stored: stored.load(group, split="tensor")):  # type: ignore[misc]
            assert part.gate_up.is_k_full
            assert part.down.is_k_full == (not act_order)
            if not act_order:
                continue
            assert part.repack("marlin").gate_up.is_k_full
            assert not part.repack("marlin").down.is_k_full
        whole = stored.load()
        assert (whole.gate_up.is_k_full, whole.down.is_k_full) == (True, True)


def test_groups_that_straddle_two_ranks_are_not_whole() -> None:
    stored = stored_gptq(inner=192)
    (first, *_) = ranks(4, lambda group: stored.load(group, split="tensor"))

    assert first.down.fields()["scales"].shape[1] == 6  # of 192 inputs, of which 48 are here
    assert not first.down.is_k_full


def test_one_group_is_always_whole() -> None:
    stored = stored_gptq(inner=64, hidden=64)
    for name in list(stored.tensors):
        if name.endswith("g_idx"):
            stored.tensors[name] = torch.zeros(64, dtype=torch.int32)
        if name.endswith(("scales", "qzeros")):
            stored.tensors[name] = stored.tensors[name][:1]
    config = {**GPTQ, "group_size": -1}
    one = replace(stored, loader=loader_from_config(config))

    for part in ranks(2, lambda group: one.load(group, split="tensor")):
        assert part.down.is_k_full


def test_experts_move_and_keep_what_they_are() -> None:
    made = stored_plain(2, biased=True).load()

    moved = made.to("meta")

    assert moved.device.type == "meta"
    assert {name: (t.shape, t.dtype) for name, t in moved.fields().items()} == {
        name: (t.shape, t.dtype) for name, t in made.fields().items()
    }
    assert {t.device.type for t in moved.fields().values()} == {"meta"}
    assert (moved.facts, moved.local, moved.shape) == (made.facts, made.local, made.shape)
    assert set(made.fields()) == {"gate_up.weight", "down.weight", "gate_up_bias", "down_bias"}


def test_experts_show_shapes_and_formats() -> None:
    made = stored_plain(2).load()
    down = "Stack({}, (2, 8, 16), unquantized, UnquantizedConfig(axes=2), weight=(2, 8, 16))"

    assert repr(made.down) == down.format(PREFIX)
    assert repr(replace(made.down, layer=replace(made.down.layer, name=""))) == down.format("experts")
    assert repr(made) == f"ExpertsWeight({PREFIX}, (2, 8, 16), {made.gate_up!r}, {made.down!r})"


def test_a_stack_holding_other_tensors_is_over_these() -> None:
    own = stored_gptq(2).load().down
    other = {field: tensor.clone() for field, tensor in own.fields().items()}

    twin = own.holding({"scales": other["scales"] * 2})

    assert twin.fields()["qweight"] is own.fields()["qweight"]
    assert_same_bits(twin.dequantize(1), own.dequantize(1) * 2)


@pytest.mark.usefixtures("seen_texts")
def test_a_stack_has_all_of_its_experts() -> None:
    one, two = layer(64, 64, 1), layer(64, 64, 2)

    with pytest.raises(ArgumentError, match="3 experts"):
        stacked("e", 3, [one, two])
    with pytest.raises(ShapeError, match="one for each expert"):
        Stack(type(one), one.config, one.layer, ("a", "b"), {"scales": torch.ones(3, 2)})
    stacking = Stacking("e", 2)
    stacking.put(one)
    with pytest.raises(MismatchError, match=r"differ in \(N, K\)"):
        stacking.put(layer(64, 96, 2))


@pytest.mark.usefixtures("seen_texts")
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda made: {"down": made.gate_up}, ShapeError),
        (lambda made: {"gate_up": made.down}, ShapeError),
        (lambda made: {"local": replace(made.local, start=1)}, MismatchError),
        (lambda made: {"gate_up_bias": torch.ones(3, 16)}, ShapeError),
        (lambda made: {"down_bias": torch.ones(2, 8)}, ShapeError),
    ],
)
def test_parts_that_are_not_of_the_same_experts_are_refused(change: Any, error: type[Exception]) -> None:
    made = stored_plain(3).load()

    with pytest.raises(error):
        replace(made, **change(made))


def test_the_module_is_made_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("qload.experts.weight.call_upward", lambda *call: asked.append(call) or "a module")
    made = stored_plain(1).load()

    assert made.get_linear() == "a module"
    assert asked == [(("qload.kernels.experts", "experts_module"), made, "declared", None, None)]


class MostBytes(TorchDispatchMode):
    """The most bytes of tensors that were made within the block and were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._made = 0, list[Any]()
        self._before: set[int] = set()  # memory that was there

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._before |= sizes(args).keys() - sizes(self._alive()).keys()
        result = function(*args, **(kwargs or {}))
        self._made += [ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._made = [made for made in self._made if made() is not None]
        held = {place: size for place, size in sizes(self._alive()).items() if place not in self._before}
        self.most = max(self.most, sum(held.values()))
        return result

    def _alive(self) -> list[Tensor]:
        return [tensor for made in self._made if (tensor := made()) is not None]


def sizes(tensors: Any) -> dict[int, int]:
    """The bytes of each memory that tensors lie in."""
    memory = [leaf.untyped_storage() for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
    return {each.data_ptr(): each.nbytes() for each in memory}


def bytes_of(weights: ExpertsWeight | Weight) -> int:
    return sum(tensor.nbytes for tensor in weights.fields().values())


@pytest.mark.parametrize("make", [stored_plain, stored_gptq], ids=["plain", "gptq"])
def test_a_load_takes_the_memory_of_the_result_and_one_expert(make: Any) -> None:
    stored = make(12, 256, 128)
    weights = stored.weights()
    with MostBytes() as peak:
        made = weights.get_experts(PREFIX, facts=FACTS)

    result = bytes_of(made)
    assert result <= peak.most <= result + result // 12


def test_a_repack_takes_one_expert_more_than_its_result() -> None:
    own = stored_gptq(12, 256, 128).load()
    alone = own.gate_up.expert(0)
    with MostBytes() as peak:
        repack(alone, "marlin")
    once = peak.most
    with MostBytes() as peak:
        made = own.repack("marlin")

    assert peak.most <= bytes_of(made) + once
