"""The traps of weight loading that concern FP8, EXL2, scratch space and compressed-tensors, by number.

Where another test is the proof, it stands there; here is what was left.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload.detect import loader_from_config
from qload.errors import ShapeError, TwoFormatsError
from qload.kernels import ExllamaLinearKernel, warm_up
from qload.layouts import compressed_tensors
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage, TensorInfo
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats import exl2_layers, fp8_layers
from tests.kernels.mp_layers import Case
from tests.paths import TESTS

pytestmark = pytest.mark.usefixtures("seen_texts")

N, K, GROUP = 32, 64, 16
LOADS: dict[str, Callable[[Weights], Any]] = {
    "whole": lambda view: view.get_weights("q"),
    "column": lambda view: view.get_weights_col("q"),
    "row": lambda view: view.get_weights_row("q"),
    "packed": lambda view: view.get_weights_col_packed("q", 2),
    "fused": lambda view: view.get_multi_weights_col(["q", "k"]),
}


@pytest.mark.parametrize("number", range(42, 56))
def test_every_trap_has_a_test_of_its_number(number: int) -> None:
    texts = [path.read_text() for path in TESTS.rglob("test_*.py")]

    assert any(re.search(rf"^def test_trap_{number}_", text, re.MULTILINE) for text in texts)


def test_trap_42_a_scale_stored_under_both_names_is_never_chosen_between() -> None:
    scale = torch.tensor([2.0])
    tensors = {**fp8_layers.layer("a", fp8_layers.codes(4, 4), scale), "a.weight_scale_inv": 1 / scale}

    with pytest.raises(TwoFormatsError, match=r"weight_scale and weight_scale_inv"):
        fp8_layers.weights(tensors).get_weights("a")


@pytest.mark.parametrize("world", [1, 2])
def test_trap_45_bytes_that_are_no_number_survive_a_fused_load(world: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(8, 32).view(torch.float8_e4m3fn)
    tensors = {f"{name}.{field}": value for name in "qk" for field, value in
               {"weight": codes, "weight_scale": torch.ones(())}.items()}  # fmt: skip

    for rank in FakeWorld(world):
        got = fp8_layers.weights(tensors, rank=rank).get_multi_weights_col(["q", "k"])
        own = codes.view(torch.uint8).chunk(world)[rank.rank()]
        assert torch.equal(got.fields()["weight"].view(torch.uint8), torch.cat([own, own]))


@pytest.mark.parametrize("load", ["column", "row", "packed"])
def test_trap_46_every_rank_has_the_whole_scale_of_static_activations(load: str) -> None:
    tensors = {
        **fp8_layers.layer("q", fp8_layers.codes(N, K), torch.ones(())),
        "q.input_scale": torch.tensor(0.3),
    }

    for rank in FakeWorld(2):
        held = LOADS[load](fp8_layers.weights(tensors, rank=rank)).fields()["input_scale"]
        assert set(held.flatten().tolist()) == {torch.tensor(0.3).item()}


@pytest.mark.parametrize("field", range(16))
def test_trap_48_a_scale_is_its_field_plus_one_squared(field: int) -> None:
    """One group of 4 bits, codes of 9, units of 256 / 256: w = (field + 1) ** 2."""
    words = torch.full((4, 32), 0x99999999 - 2**32, dtype=torch.int32)
    nibbles = sum(field << 4 * i for i in range(8))
    weight = exl2_layers.draw((4, 32)).weight(
        q_weight=words,
        q_scale=torch.full((1, 4), nibbles - 2**32 * (nibbles >= 2**31), dtype=torch.int32),
        q_scale_max=torch.tensor([256.0], dtype=torch.float16),
    )

    assert weight.dequantize().unique().tolist() == [(field + 1) ** 2]


class Prepared(nn.Module):
    """A layer that needs scratch space, on a device."""

    def __init__(self, outputs: int, inputs: int, device: str) -> None:
        super().__init__()
        case = Case(N=outputs, K=inputs)
        self.held = case.layer(case.weight())
        ExllamaLinearKernel(case.config, "qweight", "scales").process_weights_after_loading(self.held)
        self.held.to(device)

    def scratch(self, device: str) -> Tensor:
        return self.held.exllama_scratch[torch.device(device)].buffer


def test_trap_49_each_device_has_scratch_space_of_its_own_and_a_second_model_takes_none_away() -> None:
    here, there = Prepared(64, 256, "cpu"), Prepared(32, 64, "meta")

    given = warm_up(nn.ModuleList([here, there]), 4)
    again = warm_up(Prepared(32, 64, "cpu"), 1)

    assert {device.type for device in given} == {"cpu", "meta"}
    assert here.scratch("cpu").numel() == given[torch.device("cpu")] >= 2 * 64 * 256
    assert there.scratch("meta").device.type == "meta"
    assert again[torch.device("cpu")] < given[torch.device("cpu")]


@pytest.mark.parametrize("length", [31, 33])
def test_trap_51_a_bias_that_is_not_as_long_as_the_stored_outputs_is_refused(length: int) -> None:
    weight = exl2_layers.draw((4, 32)).weight()

    with pytest.raises(ShapeError, match=r"bias: wrong shape\n  expected \(32,\)"):
        weight.get_linear(torch.zeros(length))


class Watched(MemoryStorage):
    """Says which tensors were asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.asked: set[str] = set()

    def info(self, name: str) -> TensorInfo:
        self.asked.add(name)
        return super().info(name)


def packed(prefix: str, *, order: Tensor | None = None, seed: int = 0) -> dict[str, Tensor]:
    """An asymmetric pack-quantized layer of 4 bits; `order`: the group of each input, stored."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(0, 16, shape, generator=generator, dtype=torch.int32)

    return {
        f"{prefix}.weight_packed": compressed_tensors.pack(drawn(N, K), 4, True),
        f"{prefix}.weight_scale": torch.rand(N, K // GROUP, generator=generator) + 0.5,
        f"{prefix}.weight_zero_point": compressed_tensors.pack(drawn(K // GROUP, N), 4, True).T.contiguous(),
        f"{prefix}.weight_shape": torch.tensor([N, K]),
        **({} if order is None else {f"{prefix}.weight_g_idx": order}),
    }


def view(storage: MemoryStorage, actorder: Any, rank: Rank) -> Weights:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group": {"targets": ["Linear"], "weights": {**scheme, "actorder": actorder}}},
    }
    return Weights(storage, loader=loader_from_config(config), process_group=rank)


@pytest.mark.parametrize("load", LOADS)
def test_trap_52_every_load_asks_for_the_same_names(load: str) -> None:
    order = (torch.arange(K, dtype=torch.int32) * 7) % (K // GROUP)
    storage = Watched({**packed("q", order=order), **packed("k", order=order, seed=1)})

    LOADS[load](view(storage, "group", Rank(0, 2)))

    suffixes = {name.partition(".")[2] for name in storage.asked}
    assert suffixes == {"weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"}


@pytest.mark.parametrize("actorder", ["weight", "static", None])
def test_trap_53_an_order_that_was_undone_when_written_needs_no_index(actorder: Any) -> None:
    tensors = packed("q")

    got = view(MemoryStorage(tensors), actorder, Rank(0, 1)).get_weights("q").dequantize()

    codes = compressed_tensors.unpack(tensors["q.weight_packed"], K, 4, True)
    zeros = compressed_tensors.unpack(tensors["q.weight_zero_point"].T, N, 4, True).T
    group = torch.arange(K) // GROUP
    assert_same_bits(got, (codes - zeros[:, group]) * tensors["q.weight_scale"][:, group])


def test_trap_53_an_order_by_groups_has_an_index_and_is_believed() -> None:
    order = (torch.arange(K, dtype=torch.int32) * 7) % (K // GROUP)
    tensors = packed("q", order=order)

    for rank in FakeWorld(2):
        got = view(MemoryStorage(tensors), "group", rank).get_weights_row("q").dequantize()

        own = order.long().chunk(2)[rank.rank()]
        codes = compressed_tensors.unpack(tensors["q.weight_packed"], K, 4, True).chunk(2, 1)[rank.rank()]
        zeros = compressed_tensors.unpack(tensors["q.weight_zero_point"].T, N, 4, True).T
        assert_same_bits(got, (codes - zeros[:, own]) * tensors["q.weight_scale"][:, own])


@pytest.mark.parametrize("value", range(-8, 8))
def test_trap_55_signed_bytes_and_words_with_an_offset_mean_the_same(value: int) -> None:
    scale = torch.full((8, 1), 0.5)
    as_bytes = {"weight": torch.full((8, 8), value, dtype=torch.int8), "weight_scale": scale}
    as_words = {
        "weight_packed": compressed_tensors.pack(torch.full((8, 8), value + 8, dtype=torch.int32), 4, True),
        "weight_scale": scale,
        "weight_shape": torch.tensor([8, 8]),
    }
    scheme = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": True}

    for stated, tensors in (("int-quantized", as_bytes), ("pack-quantized", as_words)):
        config = {
            "quant_method": "compressed-tensors",
            "format": stated,
            "config_groups": {"group": {"targets": ["Linear"], "weights": scheme}},
        }
        named = MemoryStorage({f"a.{name}": tensor for name, tensor in tensors.items()})
        got = Weights(named, loader=loader_from_config(config)).get_weights("a").dequantize()
        assert got.unique().tolist() == [value * 0.5]
