"""EXL2 from a checkpoint: its owner's numbers, shares, fused layers, what is ignored, and its config."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qload.detect import Exl2WeightsLoader, loader_from_config
from qload.errors import ConfigError, CutError, MismatchError, ShapeError
from qload.formats import Exl2Config, Exl2Weight, UnquantizedWeight
from qload.parallel import FakeWorld, Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits
from qload.weights import Weights
from tests.formats.exl2_layers import draw, weights
from tests.paths import cases
from tests.support import owners

pytestmark = pytest.mark.usefixtures("seen_texts")

MIXED = [(8, 64), (5, 64), (4, 32)]
CONFIG = {
    "quant_method": "exl2",
    "version": "0.2.7",
    "bits": 4.0,
    "head_bits": 6,
    "calibration": {"rows": 115},
}


def read(folder: Path) -> owners.Owned:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    owner = load_file(folder / "expected" / "expected.safetensors")
    return owners.Owned(load_file(folder / "model.safetensors"), config, owner)


@pytest.mark.parametrize("folder", cases("exl2"), ids=lambda folder: folder.name)
def test_a_layer_has_its_owners_numbers(folder: Path, tmp_path: Path) -> None:
    owners.check_whole(read(folder), tmp_path)


@pytest.mark.parametrize("folder", cases("exl2"), ids=lambda folder: folder.name)
def test_all_that_float32_would_keep_is_gone(folder: Path) -> None:
    """float32 holds exactly the values of the owner's fp16."""
    layer = read(folder)

    assert torch.equal(layer.weight.dequantize(), layer.expected.float())


def test_a_fixture_has_scales_that_are_subnormal() -> None:
    largest = [read(folder).weight.q_scale_max for folder in cases("exl2")]

    assert min(float(each.min()) for each in largest) / 256 < torch.finfo(torch.float16).tiny


@pytest.mark.parametrize("world", [2, 4, 8])
def test_outputs_are_cut_by_32(world: int) -> None:
    drawn = draw(*MIXED, N=256)

    parts = [weights(drawn.named("a"), rank).get_weights_col("a") for rank in FakeWorld(world)]

    assert_same_bits(torch.cat([part.dequantize() for part in parts]), drawn.meaning())
    assert {part.fields()["q_scale"].shape for part in parts} == {(3, 256 // world // 8)}


def test_a_cut_inside_of_32_outputs_is_refused() -> None:
    with pytest.raises(CutError, match="cannot cut N = 96 at 48 for 2 ranks\n  cuts must be multiples of 32"):
        weights(draw(*MIXED, N=96).named("a"), Rank(0, 2)).get_weights_col("a")


def test_inputs_are_never_cut_and_every_rank_says_so() -> None:
    texts = set()
    for rank in FakeWorld(2):
        with pytest.raises(CutError) as caught:
            weights(draw(*MIXED).named("a"), rank).get_weights_row("a")
        texts.add(str(caught.value))

    assert texts == {
        "a.q_invperm: cannot cut K = 160 at 80 for 2 ranks\n  never cut   as q_invperm is (K!)\n"
        "  lawful   only world size 1"
    }


def test_layers_that_were_sorted_and_scaled_alike_are_fused() -> None:
    first, other = draw(*MIXED, seed=1), draw(*MIXED, seed=2, N=64)
    for name in ("q_invperm", "q_scale_max"):
        other.tensors[name] = first.tensors[name]

    fused = weights(first.named("a") | other.named("b")).get_multi_weights_col(["a", "b"])

    assert_same_bits(fused.dequantize(), torch.cat([first.meaning(), other.meaning()]))


@pytest.mark.parametrize(
    ("groups", "alike", "what"),
    [
        pytest.param([(8, 64), (4, 64), (4, 32)], (), "q_groups, from row 2 on\n  expected 5 ", id="widths"),
        pytest.param([(8, 64), (5, 96)], (), "config\n  expected groups = 3 as in a", id="groups"),
        pytest.param(MIXED, ("q_scale_max",), "q_invperm, from row 0 on", id="order"),
        pytest.param(MIXED, ("q_invperm",), "q_scale_max, from row 0 on", id="scales"),
    ],
)  # fmt: skip
def test_other_layers_are_not_fused_and_the_way_out_is_named(groups: Any, alike: Any, what: str) -> None:
    first, other = draw(*MIXED, seed=1), draw(*groups, seed=2)
    for name in alike or ("q_invperm",):
        other.tensors[name] = first.tensors[name]
    source = weights(first.named("a") | other.named("b"))

    with pytest.raises(
        MismatchError, match=rf"b: parts of a fused layer differ in {what}(.|\n)*remedy   load them as"
    ):
        source.get_multi_weights_col(["a", "b"])

    assert source.get_weights("b").shape == (32, 160)


@pytest.mark.parametrize(
    ("shift", "said"), [(0, "is equal"), (1, "differs and is believed")], ids=["right", "wrong"]
)
def test_a_stored_q_perm_is_ignored_with_a_note(shift: int, said: str) -> None:
    drawn = draw(*MIXED)
    q_perm = torch.argsort(drawn.tensors["q_invperm"]).to(torch.int32).roll(shift)
    source = weights(drawn.named("a") | {"a.q_perm": q_perm})

    weight = source.get_weights("a")

    assert_same_bits(weight.dequantize(), drawn.meaning())
    assert "q_perm" not in weight.fields()
    assert source.report().complete
    assert list(source.report().notes) == [f"a: q_perm is not read: q_invperm {said}"]


def test_widths_that_rise_are_noted() -> None:
    source = weights(draw((4, 64), (8, 64)).named("a"))

    source.get_weights("a")

    assert "widths rise" in source.report().notes[0]


def test_trap_51_padded_outputs_are_outputs_and_the_bias_has_to_have_them_all() -> None:
    """40 outputs are stored as 64: the codes of the last 24 are the middle, which means zero."""
    drawn = draw((8, 32), N=64)
    words = drawn.tensors["q_weight"].clone()
    words[:, 40:] = -0x7F7F7F80  # 0x80808080
    weight = drawn.weight(q_weight=words)

    linear = weight.get_linear(torch.ones(64))

    assert linear(torch.ones(1, 32)).shape == (1, 64)
    assert not weight.dequantize()[40:].any()
    with pytest.raises(
        ShapeError, match=r"bias: wrong shape\n  expected \(64,\) = \(N,\)\n  got      \(40,\)"
    ):
        weight.get_linear(torch.ones(40))


def test_a_config_says_the_method_and_each_layer_its_widths() -> None:
    plain = {"norm.weight": torch.ones(32, dtype=torch.float16)}

    for loader in (
        loader_from_config(CONFIG),
        loader_from_config({"quant_method": "exl2"}),
        Exl2WeightsLoader(),
    ):
        source = Weights(MemoryStorage(draw(*MIXED).named("a") | plain), loader=loader)

        assert source.get_weights("a").config == Exl2Config(groups=3)
        assert isinstance(source.get_weights("a"), Exl2Weight)
        assert isinstance(source.get_weights("norm"), UnquantizedWeight)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", "4.0"), ("bits", float("nan")), ("bits", 0), ("bits", True), ("bits", [4]),
        ("head_bits", 6.5), ("head_bits", 1), ("calibration", ""), ("version", ""),
        ("modules_to_not_convert", "lm_head"),
    ],
)  # fmt: skip
def test_a_malformed_config_is_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"quantization_config.{key}\n"):
        loader_from_config({**CONFIG, key: value})
