"""The matrix of damage: each kind done to every model of a foreign folder to which it applies.

What verify alone tells is found by it alone; what nothing inside a checkpoint tells, beside a sound copy.
Where a kind does not apply, the test is skipped, and says why.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from qload.verify import verify
from tests.cases.test_models import FOLDER, MODELS, refused
from tests.verify.damage import planted as values
from tests.verify.damage import quiet, structure
from tests.verify.damage.model import DoesNotApplyError, Model
from tests.verify.damage.planting import Plant, found_against, found_alone, planted
from tests.verify.damage.sound import MODELS as MODELS_IN_UNIT
from tests.verify.damage.sound_floats import MORE

READ = [folder for folder in MODELS if refused(folder) is None]
ALONE = (*values.PLANTS, *structure.PLANTS)

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")


def cells(plants: tuple[Plant, ...]) -> list[object]:
    return [
        pytest.param(folder, plant, id=f"{folder.name}-{plant.__name__}")
        for folder in READ
        for plant in plants
    ] or [pytest.param(None, None, id="none")]


@cache
def sound(folder: Path) -> Model:
    return Model.read(folder)


@cache
def made(name: str) -> Model:
    return MORE[name]()


@pytest.fixture(scope="module")
def sound_copies(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A folder of each sound model, written once."""
    place = tmp_path_factory.mktemp("sound")
    return cache(lambda folder: sound(folder).write(place / folder.name))


def damaged(folder: Path, plant: Plant) -> Model:
    try:
        return planted(sound(folder), plant)
    except DoesNotApplyError as reason:
        pytest.skip(f"does not apply: {reason}")


@pytest.mark.parametrize(("folder", "plant"), cells(ALONE))
def test_verify_alone_finds_it(folder: Path, plant: Plant, tmp_path: Path) -> None:
    assert found_alone(damaged(folder, plant), tmp_path / "model")


@pytest.mark.parametrize(("folder", "plant"), cells(quiet.PLANTS))
def test_a_sound_copy_tells_it(
    folder: Path, plant: Plant, sound_copies: Callable[[Path], Path], tmp_path: Path
) -> None:
    rules = found_against(damaged(folder, plant), sound_copies(folder), tmp_path / "model")

    assert rules & {"against-value", "against-shape", "against-missing"}


@pytest.mark.parametrize("plant", values.PLANTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("name", sorted(set(MORE) - set(MODELS_IN_UNIT)))
def test_verify_alone_finds_it_in_a_model_of_each_format(name: str, plant: Plant, tmp_path: Path) -> None:
    try:
        model = planted(made(name), plant)
    except DoesNotApplyError as reason:
        pytest.skip(f"does not apply: {reason}")

    assert found_alone(model, tmp_path / "model")


@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in READ])
def test_an_old_index_beside_a_newer_file_is_told(folder: Path, tmp_path: Path) -> None:
    copy = sound(folder).write(tmp_path / "model")
    structure.old_index(copy)

    assert "duplicate-tensor" in {finding.rule for finding in verify(copy).findings}
