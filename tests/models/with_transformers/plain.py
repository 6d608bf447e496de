"""Models of every type against transformers' own: only `nox -s models` collects this file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.models import load_model
from qload.parallel import Collectives, FakeWorld
from tests.models.recorded import logits, off
from tests.models.with_transformers import theirs

RANGE = 1e-5  # of the logits: sums of float32 in another order
IDS = torch.randint(3, 60, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", theirs.KINDS)
def test_logits_are_those_of_transformers(kind: str, seed: int, tmp_path: Path) -> None:
    theirs.written(theirs.config(kind, seed), tmp_path)

    model = load_model(tmp_path, dtype=torch.float32)

    assert off(logits(model, IDS), theirs.logits(tmp_path, IDS)) < RANGE
    assert off(logits(model, IDS, chunks=7), theirs.logits(tmp_path, IDS)) < RANGE


@pytest.mark.parametrize("split", ["tensor", "experts"])
@pytest.mark.parametrize("kind", theirs.KINDS)
def test_worlds_of_two_four_and_eight_have_them_too(kind: str, split: Any, tmp_path: Path) -> None:
    theirs.written(theirs.config(kind, 7), tmp_path)
    want = theirs.logits(tmp_path, IDS)

    def work(group: Collectives) -> Tensor:
        options = {"dtype": torch.float32, "process_group": group, "expert_split": split}
        return logits(load_model(tmp_path, **options), IDS, ranks=group.size())

    for ranks in (2, 4, 8):
        first, *others = FakeWorld(ranks).run(work)
        assert all(torch.equal(first, other) for other in others)
        assert off(first, want) < RANGE
