"""Borders of rules about measured values: the last sound value of each measure, and the first one beyond it.

The measures are planted in an opened checkpoint, so that only the rule decides.
"""

from collections.abc import Mapping
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload.formats.bnb import BNB4Config
from qload.verify import blocks
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.rules import RULES
from qload.verify.values import Contents, Numbers, Run, Statistics, Values
from tests.paths import FIXTURES
from tests.verify.checkpoints import GPTQ, gptq, model

UP, DOWN = "model.layers.{}.mlp.up_proj", "model.layers.{}.mlp.down_proj"
LAYER = UP.format(0)
ASYMMETRIC = {**GPTQ, "sym": False}
ACT_ORDER = {**ASYMMETRIC, "desc_act": True}


def statistics(**changes: Any) -> Statistics:
    """Return measures without a finding of any rule."""
    sound = {"outputs": 8, "whole": True, "bits": 4, "groups": 1000, "inner": 2, "deviation": 0.1}
    return Statistics(**{**sound, "evenness": 0.5, "low": 1.0, **changes})


def numbers(
    *quantiles: float, largest: float = 1.0, count: int = 64, retyped: Any = (0.0, 0.0, 0.0)
) -> Numbers:
    low, middle, high = quantiles
    return Numbers(-largest, largest, (low, middle, high), count, retyped, nan, 0)


def contents(nbytes: int = 64, word: int | None = None, digest: str = "", runs: Any = ()) -> Contents:
    return Contents(nbytes, digest.encode(), word, None, runs, None)


def found(
    rule_id: str,
    path: Path,
    of_layers: Mapping[str, Statistics] | None = None,
    of_tensors: Mapping[str, Numbers] | None = None,
    stored: Mapping[str, Contents] | None = None,
) -> dict[str, str]:
    """Return the tensors that a rule finds in a checkpoint with these measures, and the messages."""
    (rule,) = (rule for rule in RULES if rule.id == rule_id)
    with VerifiedCheckpoint.open(path, collect=True) as checkpoint:
        every = {name: contents() for name in checkpoint.names}
        vars(checkpoint)["values"] = Values({**every, **(stored or {})}, of_tensors or {}, of_layers or {})
        findings = list(rule.check(rule, checkpoint))
    assert len(findings) == len({finding.tensor for finding in findings})
    return {str(finding.tensor): finding.message for finding in findings}


def layers(folder: Path, count: int = 1, config: dict[str, Any] = ASYMMETRIC, prefix: str = UP) -> Path:
    tensors = {name: each for at in range(count) for name, each in gptq(prefix.format(at)).items()}
    return model(folder, tensors, quantization_config=config)


# Changes of measures that a rule has a finding of, and those by which it has none.
ORDER = {"groups": 128, "spread": 0.5, "evenness": 0.91, "correlation": 0.44}
LOST_ORDER = {"groups": 512, "reach": 0.96, "shuffled": 0.945}
SIZE = {"groups": 64, "reach": 0.9, "even": 0.935}
MEAN = {"groups": 64, "offset": 0.59, "zero": 7.0, "spread": 1.0, "evenness": 0.92}
LAYER_BORDERS: list[tuple[str, dict[str, Any], dict[str, Any], bool]] = [
    ("code-order", ASYMMETRIC, ORDER, True),
    ("code-order", ASYMMETRIC, {**ORDER, "groups": 127}, False),
    ("code-order", ASYMMETRIC, {**ORDER, "spread": 0.49}, False),
    ("code-order", ASYMMETRIC, {**ORDER, "evenness": 0.92}, False),
    ("code-order", ASYMMETRIC, {**ORDER, "correlation": 0.45}, False),
    ("code-order", ASYMMETRIC, {**ORDER, "correlation": None}, False),
    ("group-order", ACT_ORDER, LOST_ORDER, True),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "groups": 511}, False),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "reach": 0.97, "shuffled": 0.96}, False),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "shuffled": 0.93}, False),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "reach": None}, False),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "shuffled": None}, False),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "bits": 8}, True),
    ("group-order", ACT_ORDER, {**LOST_ORDER, "bits": 3}, False),
    ("group-size", ASYMMETRIC, SIZE, True),
    ("group-size", ASYMMETRIC, {**SIZE, "groups": 63}, False),
    ("group-size", ASYMMETRIC, {**SIZE, "even": 0.925}, False),
    ("group-size", ASYMMETRIC, {**SIZE, "even": None}, False),
    ("zero-point-mean", ASYMMETRIC, MEAN, True),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "offset": -0.59}, True),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "offset": 0.58}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "offset": 0.61, "error": 0.01}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "offset": 0.63, "error": 0.01}, True),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "bits": 5}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "groups": 63}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "evenness": 0.93}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "offset": None}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.0, "zero": 8.0}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.0, "zero": 9.0, "offset": 0.51}, True),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.0, "zero": 7.0, "offset": -0.51}, True),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.0, "zero": 9.0, "offset": 0.5}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.0, "zero": 10.0, "offset": 0.51}, False),
    ("zero-point-mean", ASYMMETRIC, {**MEAN, "spread": 0.1, "zero": 9.0, "offset": 0.51}, False),
    ("value-outlier", ASYMMETRIC, {"lost": 0.11}, True),
    ("value-outlier", ASYMMETRIC, {"lost": 0.1}, False),
    ("value-outlier", ASYMMETRIC, {"lost": 0.89}, True),
    ("value-outlier", ASYMMETRIC, {"lost": 0.9}, False),
]


@pytest.mark.parametrize(("rule", "config", "changes", "wrong"), LAYER_BORDERS)
def test_a_layer_is_found_beyond_each_border_of_its_measures(
    rule: str, config: dict[str, Any], changes: dict[str, Any], wrong: bool, tmp_path: Path
) -> None:
    assert len(found(rule, layers(tmp_path, config=config), {LAYER: statistics(**changes)})) == wrong


@pytest.mark.parametrize(("rule", "changes"), [("code-order", ORDER), ("zero-point-mean", MEAN)])
def test_a_layer_outside_of_blocks_is_not_judged_by_its_codes(
    rule: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    assert not found(rule, layers(tmp_path, prefix="up_proj{}"), {"up_proj0": statistics(**changes)})


@pytest.mark.parametrize(("offset", "count", "wrong"), [(0.51, 2, 2), (0.5, 2, 0), (0.51, 1, 0)])
def test_layers_with_one_offset_are_found_together(
    offset: float, count: int, wrong: int, tmp_path: Path
) -> None:
    measured = {UP.format(at): statistics(**{**MEAN, "offset": offset}) for at in range(count)}

    assert len(found("zero-point-mean", layers(tmp_path, count), measured)) == wrong


@pytest.mark.parametrize(
    ("count", "even", "other", "wrong"),
    [(3, 1.0, 0.99, 3), (2, 1.0, 0.99, 0), (3, 0.999, 0.99, 0), (3, 1.0, 1.0, 0)],
)
def test_few_groups_of_several_layers_show_another_size(
    count: int, even: float, other: float, wrong: int, tmp_path: Path
) -> None:
    measured = {UP.format(at): statistics(groups=8, reach=other, even=even) for at in range(count)}
    assert len(found("group-size", layers(tmp_path, count + 1), measured)) == wrong

    measured[UP.format(count)] = statistics(groups=8, reach=0.9, even=0.8)  # a layer of the stored size
    assert not found("group-size", layers(tmp_path, count + 1), measured)


# Standard deviations of the same projection of several layers, and the numbers of those that are found.
SIZES: list[tuple[list[float], list[int], str]] = [
    ([0.1, 0.1, 0.1, 2.0], [], ""),
    ([0.1, 0.1, 0.1, 2.01], [3], "the same projection of other layers has 0.1"),
    ([0.201, 0.201, 0.201, 2.01], [], ""),
    ([0.004, 0.004, 0.004, 0.5], [], ""),
    ([0.004, 0.004, 0.004, 0.51], [3], "the same projection of other layers has 0.004"),
    ([0.0051, 0.0051, 0.0051, 0.51], [], ""),
    ([0.1, 0.1, 0.1, 0.0002], [], ""),
    ([0.1, 0.1, 0.1, 0.00019], [3], "the same projection of other layers has 0.1"),
    ([0.6, 0.6, 0.6, 0.001], [], ""),
    ([2.0, 2.0, 2.0, 2.0], [], ""),
    ([2.01, 2.01, 2.01, 2.01], [0, 1, 2, 3], "sound layers have 1e-05 to 2"),
    ([2.01, 2.01, 2.01], [], ""),
    ([1e-5, 1e-5, 1e-5, 1e-5], [], ""),
    ([9e-6, 9e-6, 9e-6, 9e-6], [0, 1, 2, 3], "sound layers have 1e-05 to 2"),
    ([9e-6, 9e-6, 9e-6, 1e-5], [0, 1, 2], "sound layers have 1e-05 to 2"),
    ([0.1, 0.1, 0.1, 1000.0], [3], "the same projection of other layers has 0.1"),
    ([0.1, 0.1, 0.1, 1001.0], [3], "sound layers have 1e-05 to 2"),
    ([0.1, 0.1, 0.0, nan], [], ""),
]


@pytest.mark.parametrize(("sizes", "wrong", "against"), SIZES)
def test_weights_are_found_beyond_each_border_of_their_size(
    sizes: list[float], wrong: list[int], against: str, tmp_path: Path
) -> None:
    measured = {UP.format(at): statistics(deviation=size) for at, size in enumerate(sizes)}

    assert found("weight-size", layers(tmp_path, len(sizes)), measured) == {
        f"{UP.format(at)}.scales": (
            f"{UP.format(at)}.scales: the weights have a standard deviation of {sizes[at]:g}, and {against}"
        )
        for at in wrong
    }


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (numbers(1, 1, 1, largest=201, count=8), True),
        (numbers(1, 1, 1, largest=200, count=8), False),
        (numbers(1, 1, 1, largest=201, count=7), False),
        (numbers(1, 2, 2, largest=401, count=8), True),
        (numbers(1, 2, 2, largest=400, count=8), False),
        (numbers(1, 1, 5, largest=251, count=8), True),
        (numbers(1, 1, 5, largest=250, count=8), False),
        (numbers(0, 0, 0, largest=201, count=8), False),
    ],
)
def test_a_scale_is_an_outlier_beyond_200_medians_and_50_high_quantiles(
    measured: Numbers, wrong: bool, tmp_path: Path
) -> None:
    name = f"{LAYER}.scales"

    assert (name in found("value-outlier", layers(tmp_path), of_tensors={name: measured})) == wrong


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (numbers(1, 1, 1, largest=1.01e6), True),
        (numbers(1, 1, 1, largest=1e6), False),
        (numbers(1, 0.5, 1, largest=1e6), False),
        (numbers(1, 2, 1, largest=2.01e6), True),
        (numbers(1, 2, 1, largest=2e6), False),
    ],
)
def test_a_plain_value_is_an_outlier_beyond_a_million(measured: Numbers, wrong: bool, tmp_path: Path) -> None:
    name = f"{LAYER}.weight"
    path = model(tmp_path, {name: torch.ones(8, 16)})

    assert (name in found("value-outlier", path, of_tensors={name: measured})) == wrong


HALF, BRAIN = torch.float16, torch.bfloat16
USUAL = (1.0, 1.0, 9.0)  # quantiles of the bits as the other type
TYPES: list[tuple[torch.dtype, Numbers, bool]] = [
    (HALF, numbers(1, 1.5, 2, retyped=USUAL), True),
    (HALF, numbers(1, 1.5, 2, retyped=USUAL, count=63), False),
    (HALF, numbers(1, 1.5, 2, retyped=(1, 1, 8)), False),
    (HALF, numbers(1, 1.5, 2, retyped=(1, 1, 199)), True),
    (HALF, numbers(1, 1.5, 2, retyped=(1, 1, 200)), False),
    (HALF, numbers(1, 1.5, 2, retyped=(0, 1, 9)), False),
    (HALF, numbers(1, 1.5, 3, retyped=USUAL), False),
    (HALF, numbers(1, 1, 1, retyped=USUAL), False),
    (HALF, numbers(0.5, 0.51, 1, retyped=USUAL), True),
    (HALF, numbers(0.5, 0.5, 1, retyped=USUAL), False),
    (HALF, numbers(2, 2.49, 3, retyped=USUAL), True),
    (HALF, numbers(2, 2.5, 3, retyped=USUAL), False),
    (HALF, numbers(1e-10, 9e-10, 2e-10, retyped=USUAL), False),
    (BRAIN, numbers(1, 1.5, 2, retyped=USUAL), False),
    (BRAIN, numbers(1, 1, 1.01e6, retyped=USUAL), True),
    (BRAIN, numbers(1, 1, 1e6, retyped=USUAL), False),
    (BRAIN, numbers(1e-9, 9e-10, 1e-9, retyped=USUAL), True),
    (BRAIN, numbers(1e-9, 1e-9, 1e-9, retyped=USUAL), False),
    (BRAIN, numbers(1, 0, 1e7, retyped=USUAL), False),
]


@pytest.mark.parametrize(("dtype", "measured", "wrong"), TYPES)
def test_bits_of_the_other_type_are_told_by_their_magnitudes(
    dtype: torch.dtype, measured: Numbers, wrong: bool, tmp_path: Path
) -> None:
    matrix, vector = f"{LAYER}.weight", f"{LAYER}.bias"
    path = model(tmp_path, {matrix: torch.ones(8, 16, dtype=dtype), vector: torch.ones(8, dtype=dtype)})

    assert found("float-type", path, of_tensors={matrix: measured, vector: measured}).keys() == (
        {matrix} if wrong else set()
    )
    constant = {matrix: contents(word=5)}
    assert not found("float-type", path, of_tensors={matrix: measured}, stored=constant)


NESTED = FIXTURES / "bnb" / "nf4_nested_bf16_storage_128x256"


@pytest.mark.parametrize(
    ("low", "reach", "field"),
    [(-0.11, 1.0, "absmax"), (-0.09, 1.0, None), (0.0, 0.99, "weight"), (0.0, 1.0, None), (0.0, None, None)],
)
def test_a_block_has_its_largest_magnitude_and_no_negative_one(
    low: float, reach: float | None, field: str | None
) -> None:
    with VerifiedCheckpoint.open(NESTED, collect=True) as checkpoint:
        (layer,) = checkpoint.described()
        assert isinstance(layer.format.config, BNB4Config)
        offset = abs(layer.format.config.offset)
    measured = statistics(low=low * offset, reach=reach)

    names = [layer.names.full(field)] if field else []
    assert [*found("block-maximum", NESTED, {layer.prefix: measured})] == names


# A matrix of 16 rows of 4096 bytes: runs of one byte in it, and the number of the one that is found.
WIDTH = 4096
HOLES: list[tuple[list[tuple[int, int, int]], bool]] = [
    ([(100, 511, 0)], False),
    ([(100, 512, 0)], True),
    ([(WIDTH, 2 * WIDTH, 0)], False),
    ([(WIDTH, 2 * WIDTH, 255)], True),
    ([(WIDTH - 63, 2 * WIDTH + 63, 0)], False),
    ([(WIDTH - 64, 2 * WIDTH + 64, 0)], True),
    ([(WIDTH, 2 * WIDTH + 63, 0)], False),
    ([(WIDTH, 2 * WIDTH + 64, 0)], True),
    ([(WIDTH, 7 * WIDTH, 0)], False),
    ([(WIDTH, 8 * WIDTH, 0)], True),
    ([(row * WIDTH + 100, 600, 0) for row in range(3)], True),
    ([(row * WIDTH + 100, 600, 0) for row in range(4)], False),
    ([(row * WIDTH + 100, 600, 7) for row in range(4)], True),
    ([(row * WIDTH + 100 + 7 * (row == 2), 600 - 7 * (row == 2), 0) for row in range(4)], False),
    ([(row * WIDTH + 100 + 8 * (row == 2), 600 - 8 * (row == 2), 0) for row in range(4)], True),
    ([(row * WIDTH + 100, 600 + 7 * (row == 2), 0) for row in range(4)], False),
    ([(row * WIDTH + 100, 600 + 8 * (row == 2), 0) for row in range(4)], True),
    ([(row * WIDTH - 7, 600, 0) for row in range(1, 5)], False),
    ([(row * WIDTH + WIDTH - 600, 608, 0) for row in range(4)], False),
    ([(row * WIDTH + WIDTH - 600, 609, 0) for row in range(4)], True),
]


@pytest.mark.parametrize(("runs", "wrong"), HOLES)
def test_a_run_of_a_byte_is_a_hole_beyond_rows_and_columns_of_zeros(
    runs: list[tuple[int, int, int]], wrong: bool, tmp_path: Path
) -> None:
    name = f"{LAYER}.weight"
    path = model(tmp_path, {name: torch.ones(16, 1024)})
    measured = contents(16 * WIDTH, runs=tuple(Run(*run) for run in runs))

    found_there = found("hole", path, of_tensors={name: numbers(1, 1, 1)}, stored={name: measured})

    assert len(found_there) == wrong


@pytest.mark.parametrize(
    ("row", "output", "wrong"), [(0, 10, False), (0, 52, True), (3, 52, True), (3, 125, True), (4, 52, False)]
)
def test_equal_bytes_of_codes_in_several_rows_are_outputs_of_zeros(
    row: int, output: int, wrong: bool, tmp_path: Path
) -> None:
    """Outputs 50 to 199 are zero in four rows of words, except for one word."""
    name, width = f"{LAYER}.qweight", 1024
    qweight = torch.zeros(16, 256, dtype=torch.int32)
    qweight[:, 50:200] = -0x77777778  # eight codes of the zero point
    qweight[row, output] = 0
    tensors = {
        name: qweight,
        f"{LAYER}.qzeros": torch.full((16, 32), 0x77777777, dtype=torch.int32),
        f"{LAYER}.scales": torch.ones(16, 256, dtype=torch.float16),
        f"{LAYER}.g_idx": torch.arange(128, dtype=torch.int32) // 8,
    }
    runs = tuple(Run(at * width + 200, 600, 0x88) for at in range(4))
    path = model(tmp_path, tensors, quantization_config=GPTQ)

    assert len(found("hole", path, stored={name: contents(16 * width, runs=runs)})) == wrong


@pytest.mark.parametrize(("nbytes", "wrong"), [(63, False), (64, True)])
def test_few_equal_bytes_are_no_constant(nbytes: int, wrong: bool, tmp_path: Path) -> None:
    name, other = f"{UP.format(0)}.qweight", f"{UP.format(1)}.qweight"

    messages = found("constant-values", layers(tmp_path, 2), stored={name: contents(nbytes, word=5)})

    assert messages == (
        {
            name: f"{name}: all 64 bytes repeat 0x0000000000000005, and those of {other} differ: "
            "it was never filled"
        }
        if wrong
        else {}
    )


def shared(count: int, prefixes: tuple[str, ...], nbytes: int = 256) -> dict[str, Contents]:
    """Return codes of several layers that are equal to those of the first layer, and all others apart."""
    names = [f"{prefix.format(at)}.qweight" for at in range(count) for prefix in (UP, DOWN)]
    equal = {f"{prefix.format(at)}.qweight": prefix for at in range(count) for prefix in prefixes}
    return {name: contents(nbytes, digest=equal.get(name, name)) for name in names}


@pytest.mark.parametrize(
    ("count", "prefixes", "nbytes", "wrong"),
    [
        (2, (UP,), 256, 1),
        (2, (UP,), 255, 0),
        (3, (UP,), 256, 2),
        (4, (UP,), 256, 3),
        (5, (UP,), 256, 0),  # four layers share a matrix of the first by design
        (2, (UP, DOWN), 256, 2),
        (3, (UP, DOWN), 256, 0),  # two layers are copies of the first by design
    ],
)
def test_copies_of_few_layers_are_no_design(
    count: int, prefixes: tuple[str, ...], nbytes: int, wrong: int, tmp_path: Path
) -> None:
    tensors: dict[str, Tensor] = {}
    for at in range(count):
        for number, prefix in enumerate((UP, DOWN)):
            layer = gptq(prefix.format(at))
            layer[f"{prefix.format(at)}.scales"] *= 1 + at + number  # the layers differ in these
            tensors |= layer
    path = model(tmp_path, tensors, quantization_config=ASYMMETRIC)
    others = {name: contents(digest=name) for name in tensors}

    assert len(found("copied-layer", path, stored={**others, **shared(count, prefixes, nbytes)})) == wrong


def test_a_group_without_rows_at_the_end_is_counted(tmp_path: Path) -> None:
    tensors = {
        f"{LAYER}.qweight": torch.zeros(3, 8, dtype=torch.int32),
        f"{LAYER}.qzeros": torch.full((3, 1), 0x77777777, dtype=torch.int32),
        f"{LAYER}.scales": torch.ones(3, 8, dtype=torch.float16),
        f"{LAYER}.g_idx": torch.tensor([0] * 8 + [1] * 16, dtype=torch.int32),
    }
    path = model(tmp_path, tensors, quantization_config=ACT_ORDER)

    assert found("group-count", path) == {
        f"{LAYER}.g_idx": (
            f"{LAYER}.g_idx: group 1 has 16 rows, a group size of 8 over K = 24 gives it 8; "
            "2 of 3 groups are wrong"
        )
    }


def test_an_infinite_weight_of_several_blocks_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "MAX_ELEMENTS", 4 * 16)
    tensors = {
        f"{LAYER}.weight": torch.full((16, 16), 448.0).to(torch.float8_e4m3fn),
        f"{LAYER}.weight_scale": torch.full((16, 1), 1e30),
    }
    tensors[f"{LAYER}.weight_scale"][5:] = 3e38
    path = model(tmp_path, tensors, quantization_config={"quant_method": "fp8"})
    name = f"{LAYER}.weight_scale"

    assert found("scale-overflow", path, of_tensors={name: numbers(1, 1, 1, largest=3e38)}) == {
        name: f"{name}: scales this large, or divisors this small, make an infinity at (5, 0)"
    }
