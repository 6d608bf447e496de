"""Numbers of ranks that suit every layer, and the layers that rule out the others."""

from pathlib import Path

import pytest
import torch

from qload import MemoryStorage, Weights, loader_from_config, plan
from qload.plan.rank_counts import CANDIDATES, LawfulRanks, lawful_ranks
from tests.paths import FIXTURES
from tests.plan.test_plan import GPTQ

MODELS = sorted((FIXTURES / "models").iterdir())


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_the_numbers_are_those_of_which_each_fits(folder: Path) -> None:
    lawful = plan(folder, tp=(1, 3, 64)).lawful

    assert lawful is not None
    assert list(lawful.ranks) == [ranks for ranks in CANDIDATES if plan(folder, tp=ranks).worlds[ranks].fits]


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_the_layers_rule_out_all_others_and_none_is_needless(folder: Path) -> None:
    lawful = plan(folder, tp=64).lawful

    assert lawful is not None
    allowed = [set(each) for each in lawful.limits.values()]
    assert set(CANDIDATES).intersection(*allowed) == {*lawful.ranks}
    for left_out in range(len(allowed)):
        rest = allowed[:left_out] + allowed[left_out + 1 :]
        assert set(CANDIDATES).intersection(*rest) != {*lawful.ranks}


def test_where_all_fits_there_is_nothing_to_name() -> None:
    assert plan(MODELS[0], tp=1).lawful is None
    assert plan(MODELS[0], tp=1).to_json()["lawful"] is None


def test_experts_that_are_shared_out_allow_multiples_of_their_runs() -> None:
    mixture = FIXTURES / "models" / "gptq_mixtral"
    lawful = plan(mixture, tp=64, ep=2).lawful

    assert lawful is not None
    assert lawful.ranks
    assert all(ranks % 2 == 0 for ranks in lawful.ranks)


def test_a_kernel_that_refuses_shares_counts() -> None:
    """GPTQ of three bits, which Marlin's order has not, and ExLlama's has."""
    stored = {
        "a.down_proj.qweight": torch.zeros(12, 64, dtype=torch.int32),
        "a.down_proj.qzeros": torch.zeros(2, 6, dtype=torch.int32),
        "a.down_proj.scales": torch.zeros(2, 64, dtype=torch.float16),
    }
    held = Weights(MemoryStorage(stored), loader=loader_from_config({**GPTQ, "bits": 3}))
    plain, taken, refused = (
        plan(held, tp=64, target=kernel).lawful for kernel in (None, "exllama", "marlin")
    )

    assert plain == taken == LawfulRanks((1, 2), {"a.down_proj": (1, 2)})
    assert refused is None


@pytest.mark.parametrize(
    ("allowed", "expected", "text"),
    [
        (
            {"a": CANDIDATES, "b": (1, 2, 4), "c": (1, 3, 4)},
            LawfulRanks((1, 4), {"b": (1, 2, 4), "c": (1, 3, 4)}),
            "1 or 4 ranks suit all layers: b allows 1, 2 or 4, c allows 1, 3 or 4",
        ),
        ({"a": (1,)}, LawfulRanks((1,), {"a": (1,)}), "1 rank suits all layers: a allows 1"),
        ({"a": CANDIDATES}, LawfulRanks(CANDIDATES, {}), None),
        ({"a": (), "b": (1,)}, None, None),
    ],
)
def test_numbers_are_intersected(
    allowed: dict[str, tuple[int, ...]], expected: LawfulRanks | None, text: str | None
) -> None:
    lawful = lawful_ranks(allowed)

    assert lawful == expected
    assert text is None or (lawful is not None and lawful.text() == text)
