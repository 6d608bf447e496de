"""Known faults are named and located; a fault of no known class is said to be of none."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qload import Fp8Config, Fp8Weight, GPTQConfig, GPTQWeight, Layer, Weight
from qload.diagnosis import FAULT_CLASSES, Diagnosis, diagnose
from qload.diagnosis.comparison import Hypothesis, WeightComparison, compare, tolerance_for
from qload.diagnosis.diagnosis import (
    SAMPLE_SIZE,
    Fit,
    diagnose_comparison,
    explain_errors,
    fit_hypothesis,
    sample_errors,
)
from qload.errors import ArgumentError
from qload.formats import (
    ModelOptAWQConfig,
    ModelOptAWQWeight,
    ModelOptNVFP4Weight,
    MXFP4Config,
    MXFP4ExpertsWeight,
    NVFP4Config,
)

pytestmark = pytest.mark.usefixtures("seen_texts")
SEEN_TOO = (Diagnosis,)

N, K, GROUP = 64, 128, 32


def gptq(seed: int = 0, *, act_order: bool = False, groups: int = K // GROUP) -> GPTQWeight:
    random = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=random, dtype=torch.int32)

    index = torch.arange(K) // (K // groups)
    return GPTQWeight(
        config=GPTQConfig(4, K // groups),
        qweight=words(K // 8, N),
        qzeros=words(groups, N // 8) & 0x77777777,  # no zero point wraps
        scales=(0.01 + 0.01 * torch.rand(groups, N, generator=random)).half(),
        g_idx=(index[torch.randperm(K, generator=random)] if act_order else index).int(),
    )


WEIGHT, PERMUTED = gptq(), gptq(act_order=True)
MEANT = WEIGHT.dequantize()


def test_what_is_equal_but_for_rounding_is_not_wrong() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found = diagnose(MEANT, MEANT.to(dtype), WEIGHT)

        assert (found.fault, found.wrong, found.total) == (None, 0, N * K)


def test_zero_points_of_the_other_convention_are_named() -> None:
    got = replace(WEIGHT, qzeros=WEIGHT.qzeros + 0x11111111).dequantize().half()

    found = diagnose(MEANT, got, WEIGHT)

    assert (found.fault, found.share, found.wrong) == ("zero-points-one-higher", 1.0, N * K)
    assert found.sentence.startswith("zero points one higher (v2 read as v1): explains 100 %")
    assert found.sentence.endswith(f"of {N * K}")  # it is everywhere: no place is told


def test_a_fault_of_some_outputs_is_found_there() -> None:
    wrong = replace(WEIGHT, scales=WEIGHT.scales.roll(1, 0)).dequantize()
    got = torch.cat([MEANT[:48], wrong[48:]])

    found = diagnose(MEANT, got, WEIGHT)

    assert (found.fault, found.n, found.group) == ("scales-of-another-group", (48, 64), (0, 4))
    assert found.sentence.endswith("at outputs 48 to 63")


def test_a_fault_of_one_group_is_found_there() -> None:
    wrong = replace(WEIGHT, qzeros=WEIGHT.qzeros + 0x11111111).dequantize()
    got = MEANT.clone()
    got[:, 64:96] = wrong[:, 64:96]

    found = diagnose(MEANT, got, WEIGHT)

    assert (found.fault, found.k, found.group) == ("zero-points-one-higher", (64, 96), (2, 3))
    assert "inputs 64 to 95, group 2" in found.sentence
    assert found.sentence.startswith("zero points one higher (v2 read as v1): explains 100 %")


def test_act_order_that_is_ignored_is_named_in_both_ways() -> None:
    meant = PERMUTED.dequantize()
    order = PERMUTED.g_idx.long().argsort(stable=True)
    in_order = replace(PERMUTED, g_idx=WEIGHT.g_idx).dequantize()

    assert diagnose(meant, in_order, PERMUTED).fault == "act-order-ignored"
    assert diagnose(meant, meant[:, order], PERMUTED).fault == "act-order-ignored"
    assert diagnose(meant, meant[:, order[order]], PERMUTED).fault == "act-order-inverse"


def test_inputs_that_went_the_other_way_are_told_from_inputs_that_did_not_go() -> None:
    meant = PERMUTED.dequantize()
    order = PERMUTED.g_idx.long().argsort(stable=True)

    found = diagnose(meant, meant[:, order.argsort()], PERMUTED)

    assert (found.fault, found.share) == ("act-order-inverse", 1.0)
    assert found.sentence.startswith("inputs sorted by act order, rows in order: explains 100 %")


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.float16, 9), (torch.bfloat16, 8), (torch.float32, 18)], ids=str
)
def test_numbers_are_one_as_far_as_their_type_rounds(dtype: torch.dtype, bits: int) -> None:
    third = torch.full((4,), 1 / 3)  # which no 16-bit type holds
    tolerance = tolerance_for(third, third.to(dtype))
    one, unit = torch.tensor(1.0), 2.0**-bits

    assert bool(tolerance.agree(one, one * (1 - unit / 2)))
    assert not bool(tolerance.agree(one, one * (1 - 2 * unit)))


def test_parts_are_told_by_their_sizes() -> None:
    fused = replace(WEIGHT, layer=Layer((32, 16, 16), K, (N, K), name="q, k, v"))
    got = torch.cat([MEANT[:32], MEANT[48:], MEANT[32:48]])

    found = diagnose(MEANT, got, fused)

    assert found.fault == "parts-exchanged"
    assert "in the order 1, 3, 2 (q, k and v are exchanged)" in found.sentence


def test_rank_0s_share_is_named_on_a_rank_and_on_all() -> None:
    shares = MEANT.split(N // 4)

    one = diagnose(shares[2], shares[0], WEIGHT, rank=2, world=4)
    every = diagnose(MEANT, torch.cat([shares[0]] * 4), WEIGHT, world=4)
    swapped = diagnose(MEANT, torch.cat([shares[at] for at in (0, 2, 1, 3)]), WEIGHT, world=4)

    assert (one.fault, one.rank) == ("rank-0-everywhere", (2, 3))
    assert (every.fault, every.rank) == ("rank-0-everywhere", (1, 4))
    assert (swapped.fault, swapped.rank) == ("ranks-exchanged", (1, 3))
    assert "rank 1 has rank 2's, rank 2 has rank 1's" in swapped.sentence


def test_a_share_along_k_knows_its_own_groups() -> None:
    whole, wrong = (
        each.dequantize()[:, K // 2 :] for each in (WEIGHT, replace(WEIGHT, scales=WEIGHT.scales.roll(1, 0)))
    )

    found = diagnose(whole, wrong, WEIGHT, rank=1, world=2)

    assert (found.fault, found.group) == ("scales-of-another-group", (2, 4))


def test_experts_that_changed_places_are_named() -> None:
    weights = [gptq(seed) for seed in range(3)]
    meant = torch.stack([weight.dequantize() for weight in weights])

    found = diagnose(meant, meant[[0, 2, 1]], weights)

    assert (found.fault, found.expert) == ("experts-exchanged", (1, 3))


def test_a_fault_of_one_expert_is_named_by_its_codes() -> None:
    weights = [gptq(seed) for seed in range(3)]
    meant = torch.stack([weight.dequantize() for weight in weights])
    got = meant.clone()
    got[1] = replace(weights[1], scales=weights[1].scales.roll(-1, 0)).dequantize()

    found = diagnose(meant, got, weights)

    assert (found.fault, found.expert, found.n) == ("scales-of-another-group", (1, 2), (0, N))
    assert "expert 1" in found.sentence


def test_the_share_of_several_experts_counts_each_wrong_value() -> None:
    """Of the second expert's errors a few are noise, and of the third's half as many are wrong."""
    weights = [gptq(seed) for seed in range(3)]
    expected = torch.stack([weight.dequantize() for weight in weights])
    got = expected.clone()
    for at in (1, 2):
        shifted = replace(weights[at], qzeros=weights[at].qzeros + 0x11111111).dequantize()
        got[at, : N // at] = shifted[: N // at]
    got[1, 0, :100] += 7

    found = diagnose(expected, got, weights)

    wrong = (N + N // 2) * K
    assert (found.fault, found.expert, found.wrong) == ("zero-points-one-higher", (1, 3), wrong)
    assert found.share == pytest.approx(1 - 100 / wrong)
    assert found.sentence == (
        "zero points one higher (v2 read as v1): explains 99.2 % of 12288 wrong numbers of 24576, at experts "
        "1 to 2, outputs 0 to 63, inputs 0 to 127, groups 0 to 3"
    )


def left_out() -> Tensor:
    got = MEANT.clone()
    got[16:32, 32:64] = 0
    return got


def never_written() -> Tensor:
    got = MEANT.clone()
    got[-8:] = torch.nan
    return got


PLACES: list[tuple[str, Callable[[], Tensor]]] = [
    ("left-out", left_out),
    ("never-written", never_written),
    ("overflown", lambda: (MEANT * 1e10).half()),
    ("outputs-shifted", lambda: MEANT.roll(1, 0)),
    ("inputs-shifted", lambda: MEANT.roll(-1, 1)),
    ("outputs-reversed", lambda: MEANT.flip(0)),
    ("parts-exchanged", lambda: MEANT.roll(N // 2, 0)),
    ("parts-interleaved", lambda: MEANT.reshape(2, N // 2, K).transpose(0, 1).reshape(N, K)),
    ("factor", lambda: MEANT * -3),
    ("transposed", lambda: MEANT.reshape(N // 16, 16, K // 16, 16).transpose(1, 3).reshape(N, K)),
]


@pytest.mark.parametrize(("fault", "damaged"), PLACES)
@pytest.mark.parametrize("layer", [WEIGHT, None], ids=["typed", "plain"])
def test_a_fault_of_places_needs_no_codes(
    fault: str, damaged: Callable[[], Tensor], layer: GPTQWeight | None
) -> None:
    found = diagnose(MEANT, damaged(), layer)

    assert found.fault == fault
    assert fault in FAULT_CLASSES


def test_a_square_is_told_from_its_transpose() -> None:
    square = MEANT[:, :N]

    assert diagnose(square, square.T.contiguous()).fault == "transposed"


def test_a_bias_is_told_missing_or_twice() -> None:
    bias = torch.arange(N) / N + 1
    expected = MEANT + bias[:, None]

    assert diagnose(expected, MEANT, WEIGHT, bias=bias).fault == "bias-missing"
    assert diagnose(expected, expected + bias[:, None], WEIGHT, bias=bias).fault == "bias-twice"


def test_every_third_output_is_told_as_some_of_them() -> None:
    got = MEANT * (1 + (torch.arange(N) % 3 == 0))[:, None]

    found = diagnose(MEANT, got, WEIGHT)

    assert found.fault == "factor"
    assert found.sentence.endswith("at 22 of the outputs 0 to 63")


def test_a_fault_that_says_nothing_of_most_wrong_places_is_not_named() -> None:
    wrong = torch.ones(2, SAMPLE_SIZE, dtype=torch.bool)
    comparison = WeightComparison(torch.zeros(wrong.shape), torch.ones(wrong.shape))
    near, sample = tolerance_for(comparison.expected, comparison.got), sample_errors(wrong)

    def explaining(share: float) -> Fit | None:
        predicted = torch.zeros(wrong.shape)
        predicted[:, : round(share * SAMPLE_SIZE)] = 1
        hypothesis = Hypothesis("factor", "one more", lambda: predicted)
        return fit_hypothesis(comparison, hypothesis, wrong, near, sample)

    assert sample[0].numel() == SAMPLE_SIZE
    assert {*sample[0].tolist()} == {0, 1}
    assert explaining(0.3) is None
    assert explaining(0.6) is None
    best = explaining(0.95)
    assert best is not None
    assert best.share == round(0.95 * SAMPLE_SIZE) / SAMPLE_SIZE


def run_of_outputs(first: int, size: int) -> tuple[Tensor, Tensor]:
    """Some outputs of the weight as they are meant, and with late scales in the last four."""
    wrong = replace(WEIGHT, scales=WEIGHT.scales.roll(1, 0)).dequantize()
    meant = MEANT[first : first + size]
    return meant, torch.cat([meant[:-4], wrong[first + size - 4 : first + size]])


@pytest.mark.parametrize(("first", "places"), [(0, "12 to 15"), (16, "28 to 31"), (48, "60 to 63")])
def test_outputs_are_counted_from_the_first_of_the_layer(first: int, places: str) -> None:
    said = explain_errors(*run_of_outputs(first, 16), WEIGHT, first)

    assert said is not None
    assert said.startswith("scales of the group before: explains 100 % of ")
    assert said.endswith(f"at outputs {places}")


def test_bounds_lie_within_the_layer_and_not_within_the_run() -> None:
    meant, got = run_of_outputs(32, 16)
    comparison = replace(compare(meant, got, None), first_output=32)

    found = diagnose_comparison(comparison, tolerance_for(meant, got))

    assert (found.n, found.k) == ((44, 48), (0, K))


def test_zeros_with_numbers_between_them_are_no_tile() -> None:
    got = MEANT.clone()
    got[:, ::2] = 0

    found = diagnose(MEANT, got, WEIGHT)

    assert found.fault is None
    assert found.sentence.startswith("a fault of no known class")


def test_a_tile_of_zeros_among_many_other_errors_is_not_their_cause() -> None:
    got = MEANT + torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    got[16:32, 32:64] = 0

    assert diagnose(MEANT, got, WEIGHT).fault is None


@pytest.mark.parametrize(("zeros", "is_tile"), [(288, True), (287, False)])
def test_a_tile_may_lack_a_tenth_of_its_zeros(zeros: int, is_tile: bool) -> None:
    """Of 320 values, those of the outer rows and columns are zero, and some of the inner ones."""
    expected = MEANT.abs() + 1
    tile = torch.ones(16, 20, dtype=torch.bool)
    inner = torch.arange(14 * 18) >= 320 - zeros
    tile[1:-1, 1:-1] = inner.reshape(14, 18)
    got = expected.clone()
    got[8:24, 32:52][tile] = 0

    assert (diagnose(expected, got).fault == "left-out") == is_tile


def test_one_wrong_number_is_of_no_class() -> None:
    got = MEANT.clone()
    got[5, 7] += 1

    found = diagnose(MEANT, got, WEIGHT)

    assert (found.fault, found.wrong, found.n, found.k) == (None, 1, (5, 6), (7, 8))
    assert found.sentence.startswith(f"a fault of no known class: 1 of {N * K} numbers are wrong")


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the shape of `expected`"):
        diagnose(MEANT, MEANT.T, WEIGHT)


def random_bytes(seed: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(256, shape, generator=random).to(torch.uint8)


def fp8(strategy: str, *scales: int) -> Fp8Weight:
    random = torch.Generator().manual_seed(7)
    weight = torch.randn(N, K, generator=random).to(torch.float8_e4m3fn)
    scale = 0.5 + torch.rand(scales, generator=random)
    config = Fp8Config("block", (16, 32)) if strategy == "block" else Fp8Config(strategy)
    return Fp8Weight(config=config, weight=weight, weight_scale=scale)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("axis", [0, 1], ids=["outputs", "inputs"])
@pytest.mark.parametrize(
    "layer", [WEIGHT, PERMUTED, fp8("block", 4, 4), fp8("tensor", 1), fp8("channel", N, 1)], ids=range(5)
)
def test_the_codes_of_a_share_are_those_of_its_rank(layer: Weight, axis: int, rank: int) -> None:
    """Sign bits are inverted in codes alone, so that codes of another rank explain nothing."""
    shares = layer.dequantize().chunk(2, axis)
    codes = layer.codes()
    sign = 2 ** (codes.bits - 1)
    wrong = replace(codes, codes=codes.plain() ^ sign).dequantize().chunk(2, axis)

    found = diagnose(shares[rank], wrong[rank], layer, rank=rank, world=2)

    assert (found.fault, found.share, found.rank) == ("code-sign", 1.0, (rank, rank + 1))


def test_a_share_that_the_layer_does_not_have_is_compared_by_places_alone() -> None:
    share = MEANT[: N // 2]
    wrong = replace(WEIGHT, scales=WEIGHT.scales.roll(1, 0)).dequantize()[: N // 2]

    assert diagnose(share, wrong, WEIGHT, rank=0, world=2).fault == "scales-of-another-group"
    assert diagnose(share, wrong, WEIGHT, rank=0, world=3).fault is None
    assert diagnose(share[:, 1:], wrong[:, 1:], WEIGHT, rank=0, world=2).fault is None
    assert diagnose(share, share.flip(0), WEIGHT, rank=0, world=3).fault == "outputs-reversed"


FACTORED = ModelOptAWQWeight(
    config=ModelOptAWQConfig(32),
    weight=random_bytes(1, N // 2, K),
    weight_scale=0.5 + torch.rand(N, K // 32, generator=torch.Generator().manual_seed(2)),
    pre_quant_scale=0.5 + torch.rand(K, generator=torch.Generator().manual_seed(3)),
)


@pytest.mark.parametrize(
    ("power", "text"),
    [
        (-1, "inputs not multiplied by their factors"),
        (1, "inputs multiplied by their factors twice"),
        (-2, "inputs divided by their factors"),
    ],
)
@pytest.mark.parametrize("rank", [None, 1])
def test_factors_of_inputs_are_named(power: int, text: str, rank: int | None) -> None:
    factors = FACTORED.pre_quant_scale
    expected = FACTORED.dequantize() * factors
    wrong = expected * factors**power
    if rank is not None:
        expected, wrong = (each[:, K // 2 :] for each in (expected, wrong))

    found = diagnose(expected, wrong, FACTORED, rank=rank, world=None if rank is None else 2)

    assert (found.fault, found.share) == ("input-factors", 1.0)
    assert found.sentence.startswith(text)


def test_codes_beside_factors_and_a_bias_are_read_with_both() -> None:
    codes, bias = FACTORED.codes(), torch.arange(N) / 8
    wrong = replace(codes, codes=codes.plain() ^ 8).dequantize()
    expected, got = (
        each * FACTORED.pre_quant_scale + bias[:, None] for each in (FACTORED.dequantize(), wrong)
    )

    found = diagnose(expected, got, FACTORED, bias=bias)

    assert (found.fault, found.share) == ("code-sign", 1.0)


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (4.0, "weight_scale_2 missing"),
        (0.25, "weight_scale_2 applied twice"),
        (16.0, "weight_scale_2 inverted"),
        (0.0625, "weight_scale_2 multiplied by where it divides"),
    ],
)
def test_a_wrong_use_of_the_scale_of_the_whole_tensor_is_named(factor: float, text: str) -> None:
    weight = ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=random_bytes(4, N, K // 2),
        weight_scale=(0.5 + torch.rand(N, K // 16)).to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor([0.25]),
    )
    expected = weight.dequantize()

    found = diagnose(expected, expected * factor, weight)

    assert (found.fault, found.sentence.partition(":")[0]) == ("second-scale", text)


def test_a_stack_is_diagnosed_expert_by_expert() -> None:
    stack = MXFP4ExpertsWeight(
        config=MXFP4Config(),
        blocks=random_bytes(5, 3, N, K // 32, 16),
        scales=random_bytes(6, 3, N, K // 32) % 8 + 120,
    )
    expected = stack.dequantize()
    wrong = replace(stack, scales=stack.scales.roll(1, 2)).dequantize()
    got = torch.stack([expected[0], wrong[1], expected[2]])

    found = diagnose(expected, got, stack)

    assert (found.fault, found.expert, found.n, found.k) == (
        "scales-of-another-group",
        (1, 2),
        (0, N),
        (0, K),
    )


def test_experts_with_faults_of_two_classes_have_none_in_common() -> None:
    weights = [gptq(seed) for seed in range(2)]
    expected = torch.stack([weight.dequantize() for weight in weights])
    got = torch.stack([expected[0].flip(0), -3 * expected[1]])

    found = diagnose(expected, got, weights)

    assert (found.fault, found.expert, found.wrong) == (None, (0, 2), int((got != expected).sum()))
