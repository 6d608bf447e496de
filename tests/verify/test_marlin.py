"""Marlin checkpoints, dense and 2:4: inspection, verification, and location of damage."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qload.verify import inspect, verify
from tests.paths import cases
from tests.verify import damage

pytestmark = pytest.mark.usefixtures("seen_texts")

FOLDERS = [folder for folder in cases("marlin", "gptq_marlin_24") if (folder / "model.safetensors").is_file()]
SPARSE = [folder for folder in FOLDERS if folder.parent.name == "gptq_marlin_24"]


def name(folder: Path) -> str:
    return f"{folder.parent.name}-{folder.name}"


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_a_sound_one_is_told_as_it_is_and_clean(folder: Path) -> None:
    report = inspect(folder)

    (layer,) = report.layers
    assert (layer.format, layer.sym, layer.act_order) == (
        "marlin_24" if folder in SPARSE else "marlin", True, False,
    )  # fmt: skip
    assert (layer.bits, layer.dtype) == (report.claims["bits"], "float16")
    assert report.findings == verify(folder, tp=1).findings == verify(folder, against=folder).findings == ()


def no_scales(case: damage.Case) -> None:
    del case.tensors[case.of("s")]


def no_metadata(case: damage.Case) -> None:
    del case.tensors[case.of("B_meta")]


def one_field(case: damage.Case) -> None:
    case.tensors[case.of("B_meta")][3, 17] = 0x4404


def nan_scale(case: damage.Case) -> None:
    case.tensors[case.of("s")][0, 5] = float("nan")


def wide_words(case: damage.Case) -> None:
    case.tensors[case.of("B_24")] = case.tensors[case.of("B_24")].long()


def rolled_scales(case: damage.Case) -> None:
    case.tensors[case.of("s")] = case.tensors[case.of("s")].roll(1, 1)


def swapped_codes(case: damage.Case) -> None:
    words = case.tensors[case.of("B_24")]
    case.tensors[case.of("B_24")] = words.bitwise_xor(torch.full_like(words, 0x1))


@pytest.mark.parametrize(
    ("break_it", "found", "beside"),
    [
        pytest.param(no_scales, "missing-tensor", "against-missing", id="scales lost"),
        pytest.param(no_metadata, "missing-tensor", "against-missing", id="metadata lost"),
        pytest.param(one_field, "field-value", "field-value", id="a field of metadata"),
        pytest.param(nan_scale, "scale-value", "against-value", id="a NaN scale"),
        pytest.param(wide_words, "tensor-dtype", "against-missing", id="words of 64 bits"),
        pytest.param(rolled_scales, "", "against-value", id="scales rolled"),
        pytest.param(swapped_codes, "", "against-value", id="codes changed"),
    ],
)
def test_damage_is_found(
    break_it: Callable[[damage.Case], None], found: str, beside: str, tmp_path: Path
) -> None:
    case = damage.read_case(SPARSE[0])
    break_it(case)
    broken = damage.write_case(case, tmp_path / "broken")

    assert {finding.rule for finding in verify(broken).findings} == set(found.split())
    compared = verify(broken, against=SPARSE[0])
    assert {finding.rule for finding in compared.findings} == {*found.split(), beside}
