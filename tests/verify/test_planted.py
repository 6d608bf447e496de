"""Damage to values in a model of each format, and the responsible rule."""

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qload.verify import verify
from tests.example_counts import some
from tests.paths import FIXTURES
from tests.verify.damage import planted
from tests.verify.damage.model import DoesNotApplyError, Model
from tests.verify.damage.sound import MODELS
from tests.verify.damage.sound_floats import MORE

FOLDERS = {
    "awq": FIXTURES / "awq/model_gemm_g64",
    "gptq": FIXTURES / "gptq/model_g32_desc_act",
    "nf4 nested": FIXTURES / "bnb/nf4_nested_bf16_storage_128x256",
}
NAMES = [*MODELS, *FOLDERS]
SAMPLE = {  # formats with a separate branch in a rule; `nox -s cases` runs all formats
    "nvfp4": (planted.scales_times_a_thousand, planted.all_scales_inverted, planted.hole_of_a_page),
    "mxfp4": (planted.scales_inverted, planted.scale_times_256, planted.a_third_of_the_scales_zero),
    "mxfp8": (planted.codes_never_filled, planted.projection_copied),
    "int8": (planted.scales_all_one, planted.block_twice),
    "eetq": (planted.hole_of_half, planted.scales_inverted),
    "asymmetric": (planted.zeros_one_higher, planted.nibbles_swapped),
    "marlin": (planted.gate_over_up, planted.scale_times_256),
    "exl2": (planted.codes_never_filled, planted.scales_inverted, planted.hole_of_a_page),
}

# Responsible rule of each damage; other rules may report it, too.
RULES = {
    planted.codes_never_filled: {"constant-values"},
    planted.scales_all_one: {"constant-values"},
    planted.never_filled: {"constant-values"},
    planted.embedding_zero: {"constant-values"},
    planted.head_zero: {"constant-values"},
    planted.projection_zero: {"constant-values"},
    planted.norm_zero: {"constant-values"},
    planted.head_half_zero: {"hole"},
    planted.hole_of_a_page: {"hole"},
    planted.hole_of_half: {"hole"},
    planted.block_twice: {"repeated-block"},
    planted.layer_copied: {"copied-layer"},
    planted.projection_copied: {"copied-layer"},
    planted.gate_over_up: {"copied-layer"},
    planted.zeros_one_higher: {"zero-point-mean"},
    planted.zeros_one_lower: {"zero-point-mean"},
    planted.all_zeros_beside_the_middle: {"zero-point-mean"},
    planted.even_codes_first: {"code-order"},
    planted.nibbles_swapped: {"code-order"},
    planted.act_order_lost: {"group-order"},
    planted.act_order_of_one_lost: {"group-order"},
    planted.act_order_permuted: {"group-order"},
    planted.group_size_times_five_fourths: {"group-size", "group-count"},
    planted.scales_inverted: {"weight-size"},
    planted.all_scales_inverted: {"weight-size"},
    planted.scales_times_a_thousand: {"weight-size"},
    planted.a_third_of_the_scales_zero: {"value-outlier"},
    planted.scale_times_256: {"value-outlier"},
    planted.embedding_of_the_other_type: {"float-type"},
    planted.scales_of_the_other_type: {"float-type", "weight-size"},
    planted.value_of_1e30: {"value-outlier"},
    planted.offset_negated: {"block-maximum"},
    planted.block_without_an_end: {"block-maximum"},
    planted.double_quant_claimed: {"claimed-detail"},
    planted.e4m3_claimed: {"claimed-detail"},
}


@cache
def sound(name: str) -> Model:
    return Model.read(FOLDERS[name]) if name in FOLDERS else MORE[name]()


@cache
def damaged(name: str, plant: planted.Plant) -> Model | None:
    model = copy.deepcopy(sound(name))
    try:
        plant(model)
    except DoesNotApplyError:
        return None
    return model


def cells() -> Iterator[Any]:
    for place, plant in enumerate(planted.PLANTS):
        names = [name for name in NAMES if damaged(name, plant) is not None]
        named = [pytest.param(name, plant, id=f"{plant.__name__}-{name}") for name in names]
        yield from some(named, 2, place)


CELLS = [*cells()] + [
    pytest.param(name, plant, id=f"{plant.__name__}-{name}")
    for name, plants in SAMPLE.items()
    for plant in plants
]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_found_in_a_sound_model(name: str, tmp_path: Path) -> None:
    report = verify(sound(name).write(tmp_path / "sound"))

    assert report.findings == ()
    assert report.layers


@pytest.mark.parametrize(("name", "plant"), CELLS)
def test_damage_is_found_by_its_evidence(name: str, plant: planted.Plant, tmp_path: Path) -> None:
    model = damaged(name, plant)
    assert model is not None

    found = {finding.rule for finding in verify(model.write(tmp_path / "damaged")).findings}

    assert found & RULES[plant]


@pytest.mark.parametrize("attention", [True, False])
def test_inverted_scales_of_all_of_some_projections_are_each_told(attention: bool, tmp_path: Path) -> None:
    model = copy.deepcopy(sound("fp8"))
    inverted = [model.scales(codes) for codes in model.codes() if ("self_attn" in codes) == attention]
    for name in inverted:
        model.tensors[name] = 1 / model.tensors[name]

    report = verify(model.write(tmp_path / "damaged"))

    assert {finding.tensor for finding in report.findings if finding.rule == "weight-size"} == {*inverted}


def test_every_damage_is_done_to_some_model() -> None:
    assert set(RULES) == set(planted.PLANTS)
    assert {plant for plant in RULES if any(damaged(name, plant) for name in NAMES)} == set(RULES)


@pytest.mark.parametrize("tier", ["headers", "values", "meaning"])
def test_a_tier_is_the_last_that_is_asked(tier: str, tmp_path: Path) -> None:
    model = copy.deepcopy(sound("gptq"))
    planted.codes_never_filled(model)
    planted.act_order_of_one_lost(model)
    stages = []

    report = verify(
        model.write(tmp_path / "damaged"), tier=tier, progress=lambda stage, *_: stages.append(stage)
    )

    found = {finding.rule for finding in report.findings}
    assert ("constant-values" in found) == (tier != "headers")
    assert ("group-order" in found) == (tier == "meaning")
    assert set(stages) == {"headers", "values", "meaning"} - {
        "headers": {"values", "meaning"}, "values": {"meaning"}, "meaning": set[str]()
    }[tier]  # fmt: skip
