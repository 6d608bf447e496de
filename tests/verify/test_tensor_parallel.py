"""World sizes with and without possible shares of a checkpoint."""

from pathlib import Path

import pytest

from qload.errors import ArgumentError
from qload.plan.rank_counts import CANDIDATES
from qload.verify import verify
from qload.verify.report import group_findings
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model

pytestmark = pytest.mark.usefixtures("seen_texts")


def test_a_world_that_cannot_share_a_layer_is_told_with_the_lawful_ones(tmp_path: Path) -> None:
    tensors = {**gptq("model.q_proj"), **gptq("model.o_proj"), **gptq("model.other")}
    folder = model(tmp_path, tensors, quantization_config=GPTQ)

    report = verify(folder, tp=4)

    assert verify(folder, tp=1).findings == ()
    assert [(finding.rule, finding.tensor) for finding in report.findings] == [
        ("tensor-parallel", "model.o_proj.qweight"),
        ("tensor-parallel", "model.q_proj.qzeros"),
    ]
    assert (
        "for 4 ranks, another layer can be split neither by outputs nor by inputs: model.other"
        in report.notes
    )


def test_the_remedy_names_the_numbers_of_ranks_that_suit_all_layers(tmp_path: Path) -> None:
    tensors = {**gptq("model.layers.0.q_proj"), **gptq("model.layers.0.o_proj"), **gptq("model.other")}
    folder = model(tmp_path, tensors, quantization_config=GPTQ)

    findings = verify(folder, tp=(4, 2)).findings

    lawful = "1 rank suits all layers: model.layers.0.q_proj allows 1"
    assert {finding.remedy for finding in findings} == {lawful}
    assert verify(folder, tp=1).findings == ()
    for ranks in CANDIDATES[1:]:
        assert verify(folder, tp=ranks).findings
    assert {finding.cause.rpartition(" (")[2] for finding in findings} == {"4 ranks)", "2 ranks)"}


def test_of_a_model_the_layers_that_rule_out_numbers_are_named() -> None:
    folder = FIXTURES / "awq" / "model_gemm_g64"
    report = verify(folder, tp=16)
    lawful = [ranks for ranks in CANDIDATES if not verify(folder, tp=ranks).findings]

    assert lawful == [1, 2]
    (remedy,) = {finding.remedy for finding in report.findings}
    assert remedy == (
        "1 or 2 ranks suit all layers: model.layers.0.self_attn.o_proj allows 1, 2 or 4, "
        "model.layers.0.mlp.down_proj allows 1, 2, 3 or 6"
    )
    heads = [finding for finding in report.findings if "query heads" in finding.message]
    (group,) = group_findings(heads)
    assert group.places() == ["model.layers.{0..1}.self_attn.q_proj"]


def test_of_layers_that_no_world_can_share_the_first_four_are_named(tmp_path: Path) -> None:
    others = [f"model.other{number}" for number in range(5)]
    tensors = {name: held for other in others for name, held in gptq(other).items()}

    report = verify(model(tmp_path, tensors, quantization_config=GPTQ), tp=4)

    assert (
        f"for 4 ranks, 5 other layers can be split neither by outputs nor by inputs: {', '.join(others[:4])}"
        in report.notes
    )


def test_a_world_of_none_is_a_callers_mistake(tmp_path: Path) -> None:
    for none in (0, (), (2, 0)):
        with pytest.raises(ArgumentError, match="tp\n  expected at least 1"):
            verify(tmp_path, tp=none)
