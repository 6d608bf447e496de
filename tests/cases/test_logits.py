"""Every model of a foreign folder that is read reproduces the logits recorded with its owner's weights."""

from pathlib import Path

import pytest
import torch

from qload.checkpoint import open_checkpoint
from qload.errors import CutError
from qload.parallel import Collectives, FakeWorld
from tests.cases.test_cases import FOLDER
from tests.cases.test_models import every_model, published, refused
from tests.format_cases import lawful
from tests.models.recorded import Rounded, logits, off, owners_dtype, recorded

RANGE = 1e-5  # of the logits: what float32 may cost, and less than one more rounding of the weights
pytestmark = pytest.mark.skipif(not FOLDER, reason="QLOAD_CASES names no folder of cases")


@every_model
def test_a_model_has_its_recorded_logits_in_one_pass_and_in_several(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if refused(folder) is not None:
        pytest.skip("refused by name")
    copy, (ids, want) = published(folder, tmp_path / "model"), recorded(folder)
    model = Rounded(owners_dtype(folder)).load(copy)

    assert "belong to no layer" not in caplog.text
    assert off(logits(model, ids), want) < RANGE
    assert off(logits(model, ids, chunks=ids.shape[1]), want) < RANGE


@every_model
@pytest.mark.parametrize("split", ["tensor", "experts"])
def test_two_ranks_have_the_logits_of_one_or_cannot_cut_a_layer(
    folder: Path, tmp_path: Path, split: str
) -> None:
    if refused(folder) is not None:
        pytest.skip("refused by name")
    copy, (ids, want) = published(folder, tmp_path / "model"), recorded(folder)
    rounded = Rounded(owners_dtype(folder))

    def work(group: Collectives) -> torch.Tensor:
        return logits(rounded.load(copy, group, expert_split=split), ids, ranks=2)

    try:
        first, second = FakeWorld(2).run(work)
    except CutError as refusal:
        cut = refusal
    else:
        assert torch.equal(first, second)
        assert off(first, want) < RANGE
        return
    prefix = cut.tensor.rpartition(".")[0]
    with open_checkpoint(copy) as weights:
        whole = weights.get_weights(prefix)
    assert not lawful(whole.config, cut.dim, whole.shape["NK".index(cut.dim)], 2, whole.shape[1])
