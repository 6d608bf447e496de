"""Damage to a layer of each format, and the mode with the first finding.

A row has the rules of `inspect`, of `verify`, and of `verify --against`; with an empty entry for the first
two, only another checkpoint shows the damage.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from qload.verify import Report, inspect, verify
from tests.paths import FIXTURES, FOLDERS, cases
from tests.verify import format_damage as do
from tests.verify.damage import read_tensors, write_case

LOST = "missing-tensor"
HEADERS = "against-missing"  # an unreadable layer cannot be compared


@dataclass(frozen=True)
class Row:
    """Damage to a fixture. `against`: findings in addition to those of `verify`."""

    case: str
    what: str
    damage: do.Damage
    inspect: str = ""
    verify: str = ""
    against: str = "against-value"


def headers(case: str, what: str, damage: do.Damage, rule: str) -> Row:
    return Row(case, what, damage, rule, rule, HEADERS)


def values(case: str, what: str, damage: do.Damage, rule: str, against: str = "against-value") -> Row:
    return Row(case, what, damage, "", rule, against)


def only_against(case: str, what: str, damage: do.Damage) -> Row:
    return Row(case, what, damage)


NF4, NESTED, INT8 = "bnb/nf4_odd_33x65", "bnb/fp4_nested_ragged_60x100", "bnb/int8_16x128"
BLOCK, E8M0, TENSOR = "fp8/block_132x32", "fp8/block_ue8m0_144x16", "fp8/tensor_fnuz_2x128"
INVERSE, EXL2, EETQ = "fp8/inverse_tensor_e5m2_16x64", "exl2/b4_3_g64_384x32", "eetq/128x64"
PACK, STATIC = "compressed_tensors/pack_w4_g32_asym", "compressed_tensors/int_w8_tensor_static"
CT_NVFP4, NVFP4 = "compressed_tensors/nvfp4", "modelopt/nvfp4"
CT_MXFP4, EXPERTS, MARLIN = "compressed_tensors/mxfp4", "mxfp4/experts_e2_n8_k64", "marlin/g128_256x128"
NAN = float("nan")

TABLE = [
    headers(NF4, "codes lost", do.dropped(".weight"), LOST),
    headers(NF4, "scales lost", do.dropped(".weight.absmax"), LOST),
    headers(NF4, "table lost", do.dropped(".quant_map"), LOST),
    headers(NF4, "state lost", do.dropped("__nf4"), LOST),
    headers(NF4, "state alone", do.alone("__nf4"), LOST),
    headers(NF4, "state truncated", do.truncated("__nf4"), "config"),
    headers(NF4, "state of another shape", do.says("__nf4", "shape", [33, 66]), "tensor-shape"),
    headers(NF4, "state of a mad block", do.says("__nf4", "blocksize", 1 << 40), "config"),
    headers(NF4, "scales of half", do.retyped(".absmax", torch.float16), "tensor-dtype"),
    headers(NF4, "codes of 64 bits", do.retyped(".weight", torch.int64), "tensor-dtype"),
    values(NF4, "NaN scale", do.set_to(".absmax", NAN), "scale-value"),
    values(NF4, "negative scale", do.set_to(".absmax", -1.0), "scale-value"),
    values(NF4, "scales of zero", do.zeros(".absmax"), "scale-value"),
    values(NF4, "NaN in the table", do.set_to(".quant_map", NAN), "field-value float-value"),
    values(NF4, "another table", do.rolled(".quant_map"), "field-value"),
    only_against(NF4, "blocks rolled", do.rolled(".absmax")),
    only_against(NF4, "nibbles swapped", do.nibbles_swapped(".weight")),
    headers(NESTED, "inner scales lost", do.dropped("nested_absmax"), LOST),
    headers(NESTED, "one inner scale more", do.longer("nested_absmax"), "tensor-shape"),
    values(NESTED, "NaN inner scale", do.set_to("nested_absmax", NAN), "scale-value"),
    values(NESTED, "inner scales of zero", do.zeros("nested_absmax"), "scale-value"),
    values(NESTED, "NaN in its table", do.set_to("nested_quant_map", NAN), "field-value float-value", ""),
    values(NESTED, "another inner table", do.rolled("nested_quant_map"), "field-value"),
    only_against(NESTED, "blocks rolled", do.rolled(".weight.absmax")),
    headers(INT8, "scales lost", do.dropped("SCB"), LOST),
    headers(INT8, "codes lost", do.alone("SCB"), LOST),
    values(INT8, "a code of -128", do.byte(".weight", 0x80), "field-value"),
    values(INT8, "negative scale", do.set_to("SCB", -1.0), "scale-value"),
    values(INT8, "scales of zero", do.zeros("SCB"), "scale-value"),
    only_against(INT8, "scales rolled", do.rolled("SCB")),
    headers(BLOCK, "scales lost", do.dropped("_inv"), LOST),
    headers(BLOCK, "codes lost", do.dropped(".weight"), LOST),
    headers(BLOCK, "scales under two names", do.copied("_inv", ""), "two-formats"),
    headers(BLOCK, "one block more", do.longer("_inv"), "tensor-shape"),
    headers(BLOCK, "scales of 64 bits", do.retyped("_inv", torch.float64), "tensor-dtype"),
    headers(BLOCK, "codes as whole numbers", do.retyped(".weight", torch.int8), "tensor-dtype"),
    values(BLOCK, "NaN code", do.byte(".weight", 0x7F), "float-value"),
    values(BLOCK, "infinite scale", do.set_to("_inv", float("inf")), "scale-value"),
    only_against(BLOCK, "blocks rolled", do.rolled("_inv")),
    values(E8M0, "NaN exponent", do.byte("_inv", 255), "scale-value"),
    only_against(E8M0, "another exponent", do.byte("_inv", 100)),
    values(E8M0, "an exponent below all", do.byte("_inv", 1), "value-outlier"),
    values(TENSOR, "activations' scale of zero", do.zeros("input_scale"), "scale-value", ""),
    values(TENSOR, "NaN for activations", do.set_to("input_scale", NAN), "scale-value", ""),
    values(TENSOR, "scale of zero", do.zeros("weight_scale"), "scale-value"),
    values(INVERSE, "divisor of zero", do.zeros("_inv"), "scale-value"),
    values(INVERSE, "infinite code", do.byte(".weight", 0x7C), "float-value"),
    headers(EXL2, "scales lost", do.dropped("q_scale_max"), LOST),
    headers(EXL2, "codes alone", do.alone("q_weight"), LOST),
    headers(EXL2, "a place twice", do.byte("q_invperm", 3), "index-range"),
    headers(EXL2, "a group of no width", do.byte("q_groups", 7), "mismatch"),
    headers(EXL2, "units of 32 bits", do.retyped("q_scale_max", torch.float32), "tensor-dtype"),
    values(EXL2, "NaN unit", do.set_to("q_scale_max", NAN), "scale-value"),
    values(EXL2, "negative unit", do.set_to("q_scale_max", -1.0), "scale-value"),
    only_against(EXL2, "units rolled", do.rolled("q_scale_max")),
    only_against(EXL2, "scales' nibbles swapped", do.nibbles_swapped("q_scale")),
    headers(EETQ, "scales lost", do.dropped("weight_scales"), LOST),
    headers(EETQ, "scales alone", do.alone("weight_scales"), LOST),
    headers(EETQ, "codes without sign", do.retyped(".weight", torch.uint8), "tensor-dtype"),
    headers(EETQ, "codes under two names", do.copied(".weight", ".qweight"), "two-formats"),
    values(EETQ, "NaN scale", do.set_to("weight_scales", NAN), "scale-value"),
    values(EETQ, "scales of zero", do.zeros("weight_scales"), "scale-value"),
    only_against(EETQ, "scales rolled", do.rolled("weight_scales")),
    headers(PACK, "scales lost", do.dropped("weight_scale"), LOST),
    headers(PACK, "zero points lost", do.dropped("zero_point"), LOST),
    headers(PACK, "shape lost", do.dropped("weight_shape"), LOST),
    headers(PACK, "codes alone", do.alone("weight_packed"), LOST),
    headers(PACK, "scales alone", do.alone("weight_scale"), LOST),
    headers(PACK, "another shape", do.byte("weight_shape", 3), "mismatch"),
    values(PACK, "NaN scale", do.set_to("weight_scale", NAN), "scale-value"),
    only_against(PACK, "groups rolled", do.rolled("weight_scale", 1)),
    only_against(PACK, "nibbles swapped", do.nibbles_swapped("weight_packed")),
    only_against(PACK, "zero points rolled", do.rolled("zero_point")),
    headers(STATIC, "activations' scale lost", do.dropped("input_scale"), LOST),
    values(STATIC, "activations' scale of zero", do.zeros("input_scale"), "scale-value", ""),
    values(STATIC, "negative scale", do.set_to("weight_scale", -1.0), "scale-value"),
    headers(CT_NVFP4, "second scale lost", do.dropped("weight_global_scale"), LOST),
    headers(CT_NVFP4, "codes as int8", do.retyped("weight_packed", torch.int8), "tensor-dtype"),
    values(CT_NVFP4, "NaN scale", do.byte("weight_scale", 0x7F), "scale-value"),
    values(CT_NVFP4, "negative scale", do.byte("weight_scale", 0xB8), "scale-value"),
    values(CT_NVFP4, "second scale of zero", do.zeros("weight_global_scale"), "scale-value"),
    values(CT_NVFP4, "NaN second scale", do.set_to("weight_global_scale", NAN), "scale-value"),
    only_against(CT_NVFP4, "nibbles swapped", do.nibbles_swapped("weight_packed")),
    only_against(CT_NVFP4, "blocks rolled", do.rolled("weight_scale", 1)),
    headers(NVFP4, "second scale lost", do.dropped("weight_scale_2"), LOST),
    values(NVFP4, "infinite second scale", do.set_to("weight_scale_2", float("inf")), "scale-value"),
    values(NVFP4, "second scale of zero", do.zeros("weight_scale_2"), "scale-value"),
    only_against(NVFP4, "nibbles swapped", do.nibbles_swapped(".weight")),
    headers(CT_MXFP4, "exponents lost", do.dropped("weight_scale"), LOST),
    headers(CT_MXFP4, "exponents as floats", do.retyped("weight_scale", torch.float32), "tensor-dtype"),
    values(CT_MXFP4, "NaN exponent", do.byte("weight_scale", 255), "scale-value"),
    values(CT_MXFP4, "exponents of zero", do.zeros("weight_scale"), "scale-value"),
    only_against(CT_MXFP4, "exponents rolled", do.rolled("weight_scale", 1)),
    headers(EXPERTS, "exponents lost", do.dropped("_scales"), LOST),
    headers(EXPERTS, "codes lost", do.dropped("_blocks"), LOST),
    values(EXPERTS, "NaN exponent", do.byte("_scales", 255), "scale-value"),
    values(EXPERTS, "exponents of zero", do.zeros("_scales"), "scale-value"),
    only_against(EXPERTS, "exponents rolled", do.rolled("_scales", 1)),
    only_against(EXPERTS, "nibbles swapped", do.nibbles_swapped("_blocks")),
    headers(MARLIN, "codes lost", do.dropped(".B"), LOST),
    headers(MARLIN, "scales lost", do.dropped(".s"), LOST),
    *(headers(case, "all lost", do.emptied, "claimed-method")
      for case in (MARLIN, NF4, INT8, BLOCK, EXL2, EETQ, PACK, NVFP4, EXPERTS)),
    Row(TENSOR, "no outputs", do.without_rows(".weight"), "empty-layer", "empty-layer", "against-shape"),
    Row(EETQ, "no inputs", do.without_rows(".weight"), "empty-layer", "empty-layer", "against-shape"),
    Row(TENSOR, "an output more", do.longer(".weight"), against="against-shape"),
    headers(INT8, "no order", do.without_rows("weight_format"), "tensor-shape"),
    headers(TENSOR, "no scale", do.without_rows("weight_scale"), "tensor-shape"),
    values(BLOCK, "a scale beyond all", do.set_to("_inv", 3e38), "scale-overflow"),
    values(INVERSE, "a divisor below all", do.set_to("_inv", 1e-38), "scale-overflow"),
    values(CT_NVFP4, "second scale below all", do.set_to("weight_global_scale", 1e-38), "scale-overflow"),
    values(CT_MXFP4, "an exponent beyond all", do.byte("weight_scale", 254), "scale-overflow value-outlier"),
    values(EXL2, "a unit beyond half precision", do.set_to("q_scale_max", 65504.0), "scale-overflow"),
    Row(EETQ, "short bias", do.bias(127, beside="weight_scales"),
        "bias-shape", "bias-shape", "against-missing"),
    Row(PACK, "one bias for all", do.bias(1, beside="weight_packed"),
        "bias-shape", "bias-shape", "against-missing"),
    Row(BLOCK, "bias of whole numbers", do.bias(132, dtype=torch.int8, beside="weight_scale_inv"),
        "bias-shape", "bias-shape", ""),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.case.replace('/', '-')}-{row.what}")
def test_damage_is_found_by_its_tier(row: Row, tmp_path: Path) -> None:
    folder = FIXTURES / row.case
    case = read_tensors(folder)
    row.damage(case)

    broken = write_case(case, tmp_path / "broken")

    assert rules(inspect(broken)) == set(row.inspect.split())
    assert rules(verify(broken)) == set(row.verify.split())
    assert rules(verify(broken, against=folder)) == {*row.verify.split(), *row.against.split()}


def test_a_kernels_order_is_a_dialect_that_is_not_read_and_no_damage(tmp_path: Path) -> None:
    case = read_tensors(FIXTURES / INT8)
    do.byte("weight_format", 1)(case)

    folder = write_case(case, tmp_path / "col32")

    for report in (inspect(folder), verify(folder), verify(folder, against=FIXTURES / INT8)):
        assert (report.verdict, report.findings) == ("incomplete", ())
        assert any("bnb_int8 in the order col32" in note for note in report.notes)


ELSEWHERE = ("gptq", "awq", "marlin", "gptq_marlin_24")  # in test_damage and test_marlin
SOUND = cases(*(name for name in FOLDERS if name not in ELSEWHERE))


@pytest.mark.parametrize("folder", SOUND, ids=lambda folder: f"{folder.parent.name}-{folder.name}")
def test_what_is_sound_is_clean(folder: Path) -> None:
    reports = [inspect(folder), verify(folder), verify(folder, against=folder)]

    assert [report.findings for report in reports] == [(), (), ()]
    assert all(report.layers for report in reports)


def rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}
