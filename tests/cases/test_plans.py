"""Every model of a foreign folder among one to eight ranks: a plan's answer is that of each rank's load."""

from pathlib import Path

import pytest

from qload import open_checkpoint, plan
from qload.detect import read_model_config
from qload.errors import QloadError
from qload.models import load_model
from tests.cases.test_cases import FOLDER
from tests.cases.test_models import every_model, published, refused
from tests.plan.test_plan import Quiet, refusal

WORLDS = tuple(range(1, 9))

pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")


def load(folder: Path, rank: int, ranks: int) -> None:
    """The share of one rank."""
    with open_checkpoint(folder, process_group=Quiet(rank, ranks)) as weights:
        load_model(weights, read_model_config(folder))


@every_model
def test_what_fits_loads_on_all_ranks_and_what_does_not_refuses_in_the_same_words(
    folder: Path, tmp_path: Path
) -> None:
    copy, name = published(folder, tmp_path / "model"), refused(folder)
    if name is not None:
        with pytest.raises(QloadError, match=name):
            plan(copy, tp=WORLDS)
        return

    found = plan(copy, tp=WORLDS)

    for ranks in WORLDS:
        told = found.worlds[ranks]
        heard = [refusal(lambda at=rank, of=ranks: load(copy, at, of)) for rank in range(ranks)]
        assert heard == [told.reason] * ranks
        assert told.fits == (not told.reason)
