"""Damage found by `verify` alone, from the architecture; damage found only with `--against`.

The full matrix over foreign models is in tests/cases; this module has each kind on two models from tools.
"""

from functools import cache
from pathlib import Path

import pytest

from qload.verify import verify
from tests.example_counts import some
from tests.paths import FIXTURES
from tests.verify.damage import planted as values
from tests.verify.damage import quiet, structure
from tests.verify.damage.model import DoesNotApplyError, Model
from tests.verify.damage.planting import Plant, found_against, found_alone, planted
from tests.verify.damage.sound_floats import MORE
from tests.verify.test_drawn_models import config_of, of_type

FOLDERS = {"awq": FIXTURES / "awq/model_gemm_g64", "gptq": FIXTURES / "gptq/model_g32_desc_act"}
QUIET = ("awq", "fp8", "nf4", "exl2")

# Inapplicable kinds, with the reason; no other combination may be absent.
DOES_NOT_APPLY = {
    ("square_transposed", "awq"): "no square matrix",
    ("nibbles_swapped", "fp8"): "no codes of four bits",
    ("square_transposed", "nf4"): "no square matrix",
    ("square_transposed", "exl2"): "no square matrix",
}
NOT_TO_EXL2 = {
    "scales_all_one": "too few", "never_filled": "too few", "a_third_of_the_scales_zero": "too few scales",
    "projection_zero": "no plain projection", "zeros_one_higher": "no zero points",
    "zeros_one_lower": "no zero points", "all_zeros_beside_the_middle": "only of GPTQ",
    "even_codes_first": "no zero points", "nibbles_swapped": "no zero points",
    "act_order_lost": "no act order", "act_order_of_one_lost": "no act order",
    "act_order_permuted": "no act order", "group_size_times_five_fourths": "no groups",
    "offset_negated": "no quantized scales", "block_without_an_end": "not bitsandbytes",
    "double_quant_claimed": "not bitsandbytes", "e4m3_claimed": "no e4m3",
}  # fmt: skip


@cache
def sound(name: str) -> Model:
    if name == "exl2 llama":
        return MORE["exl2"](make=of_type({**config_of("llama", 2), "vocab_size": 320}, 0))
    return Model.read(FOLDERS[name]) if name in FOLDERS else MORE[name]()


def cells(plants: tuple[Plant, ...], names: tuple[str, ...]) -> list[object]:
    made: list[object] = []
    for place, plant in enumerate(plants):
        made += some([pytest.param(name, plant, id=f"{plant.__name__}-{name}") for name in names], 2, place)
    return made


@pytest.mark.parametrize(("name", "plant"), cells(structure.PLANTS, ("awq", "gptq", "exl2 llama")))
def test_verify_alone_finds_what_the_architecture_tells(name: str, plant: Plant, tmp_path: Path) -> None:
    assert found_alone(planted(sound(name), plant), tmp_path / "model")


@pytest.mark.parametrize(("name", "plant"), cells(quiet.PLANTS, QUIET))
def test_a_sound_copy_tells_what_nothing_inside_does(name: str, plant: Plant, tmp_path: Path) -> None:
    reason = DOES_NOT_APPLY.get((plant.__name__, name))
    if reason is not None:
        with pytest.raises(DoesNotApplyError, match=reason):
            planted(sound(name), plant)
        return

    copy = sound(name).write(tmp_path / "sound")
    rules = found_against(planted(sound(name), plant), copy, tmp_path / "damaged")

    assert "against-value" in rules


@pytest.mark.parametrize("plant", values.PLANTS, ids=lambda plant: plant.__name__)
def test_verify_alone_finds_what_the_values_of_exl2_tell(plant: Plant, tmp_path: Path) -> None:
    reason = NOT_TO_EXL2.get(plant.__name__)
    if reason is not None:
        with pytest.raises(DoesNotApplyError, match=reason):
            planted(sound("exl2"), plant)
        return

    assert found_alone(planted(sound("exl2"), plant), tmp_path / "model")


def test_two_sources_of_one_name_are_told(tmp_path: Path) -> None:
    folder = sound("awq").write(tmp_path / "model")
    structure.old_index(folder)

    assert "duplicate-tensor" in {finding.rule for finding in verify(folder).findings}
