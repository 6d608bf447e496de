"""What the architecture tells is found by `verify` alone; what nothing inside tells, by `--against`.

The full matrix over foreign models is in tests/cases; here each kind is done to two models that tools wrote.
"""

from functools import cache
from pathlib import Path

import pytest

from qload.verify import verify
from tests.paths import FIXTURES
from tests.verify.damage import quiet, structure
from tests.verify.damage.model import DoesNotApplyError, Model
from tests.verify.damage.planting import Plant, found_against, found_alone, planted
from tests.verify.damage.sound import MODELS

FOLDERS = {"awq": FIXTURES / "awq/model_gemm_g64", "gptq": FIXTURES / "gptq/model_g32_desc_act"}
QUIET = ("awq", "fp8", "nf4")

# Where a kind cannot be done, and why: nothing else may be left out.
DOES_NOT_APPLY = {
    ("square_transposed", "awq"): "no square matrix",
    ("nibbles_swapped", "fp8"): "no codes of four bits",
    ("square_transposed", "nf4"): "no square matrix",
}


@cache
def sound(name: str) -> Model:
    return Model.read(FOLDERS[name]) if name in FOLDERS else MODELS[name]()


def cells(plants: tuple[Plant, ...], names: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, plant, id=f"{plant.__name__}-{name}") for plant in plants for name in names]


@pytest.mark.parametrize(("name", "plant"), cells(structure.PLANTS, ("awq", "gptq")))
def test_verify_alone_finds_what_the_architecture_tells(name: str, plant: Plant, tmp_path: Path) -> None:
    assert found_alone(planted(sound(name), plant), tmp_path / "model")


@pytest.mark.parametrize(("name", "plant"), cells(quiet.PLANTS, QUIET))
def test_a_sound_copy_tells_what_nothing_inside_does(name: str, plant: Plant, tmp_path: Path) -> None:
    reason = DOES_NOT_APPLY.get((plant.__name__, name))
    if reason is not None:
        with pytest.raises(DoesNotApplyError, match=reason):
            planted(sound(name), plant)
        return

    rules = found_against(planted(sound(name), plant), sound(name), tmp_path)

    assert "against-value" in rules


def test_two_sources_of_one_name_are_told(tmp_path: Path) -> None:
    folder = sound("awq").write(tmp_path / "model")
    structure.old_index(folder)

    assert "duplicate-tensor" in {finding.rule for finding in verify(folder).findings}
