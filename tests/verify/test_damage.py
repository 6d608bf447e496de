"""Every damage x every case x every mode: expected findings, and no others."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qload.verify import Report, inspect, verify
from tests.example_counts import some
from tests.paths import cases
from tests.verify import damage
from tests.verify.damage import Case

FOLDERS = cases("gptq", "awq")


def always(case: Case) -> bool:
    return True


def gptq(case: Case) -> bool:
    return case.is_gptq


def grouped(case: Case) -> bool:
    return case.is_gptq and case.tensors[case.of("scales")].shape[0] > 1


def many_groups(case: Case) -> bool:
    return case.tensors[case.of("scales")].shape[0] > 1


def model(case: Case) -> bool:
    return "model.norm.weight" in case.tensors


def layer(case: Case) -> bool:
    return not model(case)


def denying(case: Case) -> bool:
    return grouped(case) and case.quantization.get("desc_act") is False


def act_order(case: Case) -> bool:
    return grouped(case) and case.quantization.get("desc_act") is True


def symmetric(case: Case) -> bool:
    return case.is_gptq and case.quantization["sym"]


def asymmetric(case: Case) -> bool:
    return not symmetric(case)


def awq(case: Case) -> bool:
    return not case.is_gptq


def four_bits(case: Case) -> bool:
    return case.quantization["bits"] == 4


@dataclass(frozen=True)
class Row:
    """Damage, the applicable cases, and the expected rules of each mode."""

    break_it: Callable[[Case], None]
    applies: Callable[[Case], bool]
    inspect: str
    verify: str
    against: str = ""  # if different from verify
    also: str = ""  # further rules for the values of some cases

    @property
    def id(self) -> str:
        return f"{self.break_it.__name__}-{self.applies.__name__}"


TABLE = [
    Row(damage.missing_scales, layer, "missing-tensor", "missing-tensor", "missing-tensor against-missing"),
    Row(damage.missing_scales, model, "missing-tensor", "missing-sibling missing-tensor",
        "against-missing missing-sibling missing-tensor"),
    Row(damage.missing_codes, layer, "missing-tensor", "missing-tensor", "missing-tensor against-missing"),
    Row(damage.missing_zeros, layer, "missing-tensor", "missing-tensor", "missing-tensor against-missing"),
    Row(damage.missing_projection, model, "", "missing-sibling", "missing-sibling against-missing"),
    Row(damage.missing_norm, model, "", "missing-sibling", "missing-sibling against-missing"),
    Row(damage.scale_nan, always, "", "scale-value", "scale-value against-value"),
    Row(damage.scale_inf, always, "", "scale-value", "scale-value against-value"),
    Row(damage.scale_negative, always, "", "scale-value", "scale-value against-value"),
    Row(damage.plain_nan, model, "", "float-value", "float-value against-value"),
    Row(damage.stranger, layer, "unexplained-tensor", "unexplained-tensor"),
    Row(damage.stranger, model, "unexplained-tensor", "unexplained-tensor missing-sibling"),
    Row(damage.index_out_of_range, gptq, "index-range", "index-range", "index-range against-missing"),
    Row(damage.index_negative, gptq, "index-range", "index-range", "index-range against-missing"),
    Row(damage.index_counts, act_order, "", "group-count", "group-count against-value"),
    Row(damage.index_counts, denying, "", "group-count act-order", "group-count act-order against-value"),
    Row(damage.index_all_zero, act_order, "index-ambiguous", "index-ambiguous",
        "index-ambiguous against-missing"),
    Row(damage.index_all_zero, denying, "", ""),
    Row(damage.act_order_denied, grouped, "", "act-order", "act-order against-value",
        "group-order code-order"),
    Row(damage.symmetric_zeros_off, symmetric, "", "symmetry", "symmetry against-value"),
    Row(damage.bits_claim, gptq, "claimed-method", "claimed-method"),
    Row(damage.bits_claim, awq, "claimed-method", "claimed-method"),
    Row(damage.group_claim, always, "tensor-shape", "tensor-shape", "tensor-shape against-missing"),
    Row(damage.nibble_order, four_bits, "", "", "against-value", "code-order group-order"),
    Row(damage.asymmetric_zeros_off, asymmetric, "", "", "against-value", "zero-point-mean code-order"),
    Row(damage.scales_rolled, many_groups, "", "", "against-value"),
    Row(damage.index_shuffled, act_order, "", "", "against-value", "group-order"),
]  # fmt: skip

PRISTINE = {folder: damage.read_case(folder) for folder in FOLDERS}


def cells() -> Iterator[Any]:
    for place, row in enumerate(TABLE):
        folders = [folder for folder in FOLDERS if row.applies(PRISTINE[folder])]
        named = [
            pytest.param(row, folder, id=f"{row.id}-{folder.parent.name}-{folder.name}") for folder in folders
        ]
        yield from some(named, 4, place)


@pytest.mark.parametrize(("row", "folder"), list(cells()))
def test_damage_is_found_and_named(row: Row, folder: Path, tmp_path: Path) -> None:
    case = damage.read_case(folder)
    row.break_it(case)

    broken = damage.write_case(case, tmp_path / "broken")

    assert rules(inspect(broken)) == sorted(row.inspect.split())
    also = set(row.also.split())
    assert set(rules(verify(broken))) - also == set(row.verify.split())
    report = verify(broken, against=folder)
    assert set(rules(report)) - also == set((row.against or row.verify).split())
    assert all(
        finding.message.startswith(finding.tensor or finding.file or "?") for finding in report.findings
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_nothing_is_found_where_nothing_is_broken(folder: Path) -> None:
    reports = [inspect(folder), verify(folder), verify(folder, against=folder)]

    assert [report.findings for report in reports] == [(), (), ()]
    assert {report.verdict for report in reports} == {"ok"}


FILES = [
    (damage.truncated, "file-length"),
    (damage.lengthened, "file-length"),
    (damage.lying_shape, "offset-span"),
    (damage.lying_offsets, "offset-span"),
    (damage.lying_dtype, "tensor-dtype"),
]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
@pytest.mark.parametrize(("break_it", "rule"), FILES, ids=lambda part: getattr(part, "__name__", part))
def test_a_damaged_file_is_found_by_its_header(
    break_it: Callable[[Path], None], rule: str, folder: Path, tmp_path: Path
) -> None:
    broken = damage.write_case(damage.read_case(folder), tmp_path / "broken")
    break_it(broken / "model.safetensors")

    report = verify(broken)

    assert rules(report) == rules(inspect(broken)) == [rule]
    assert report.verdict == ("findings" if rule == "tensor-dtype" else "unreadable")
    assert "model.safetensors" in (report.findings[0].file or "")


def rules(report: Report) -> list[str]:
    return sorted({finding.rule for finding in report.findings})
