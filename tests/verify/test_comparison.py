"""Distance of a layer from its reference: counted elements, and unit."""

from dataclasses import replace

import torch

from qload import GPTQConfig, GPTQWeight, UnquantizedWeight
from qload.diagnosis.comparison import effective_weight
from qload.formats import ModelOptAWQConfig, ModelOptAWQWeight
from qload.verify.comparison import MAX_SPIKE, Comparison

N, K = 2 * int(MAX_SPIKE), 32  # with this number of outputs, a single one causes a spike


def gptq() -> GPTQWeight:
    """Return random codes with steps of 0.01; the step of the first output is 1000 times as large."""
    random = torch.Generator().manual_seed(0)
    scales = torch.full((1, N), 0.01).half()
    scales[0, 0] = 10
    return GPTQWeight(
        config=GPTQConfig(4, 32),
        qweight=torch.randint(-(2**31), 2**31, (K // 8, N), generator=random, dtype=torch.int32),
        qzeros=torch.full((1, N // 8), 0x77777777, dtype=torch.int32),
        scales=scales,
        g_idx=torch.zeros(K, dtype=torch.int32),
    )


def compared(weight: GPTQWeight, original: torch.Tensor) -> Comparison:
    found = Comparison()
    found.add(0, weight, UnquantizedWeight(weight=original))
    return found


def test_differences_are_counted_in_steps_of_their_own_output() -> None:
    weight = gptq()
    off = (
        torch.rand(N, K, generator=torch.Generator().manual_seed(1)) - 0.5
    )  # of a step, the error of rounding

    found = compared(weight, weight.dequantize() + off * weight.scales[0].float()[:, None])

    assert found.original
    assert found.spike_ratio < MAX_SPIKE


def test_where_there_is_no_step_nothing_is_a_step_off() -> None:
    weight = gptq()
    weight.scales[0, 3] = 0  # and therefore all of the output
    off = 0.01 * (torch.rand(N, K, generator=torch.Generator().manual_seed(1)) - 0.5)

    found = compared(weight, weight.dequantize() + off * weight.scales[0].float()[:, None])

    assert found.original
    assert found.spike_ratio < MAX_SPIKE


def test_zeros_of_the_reference_agree_with_whatever_is_zero_and_count_for_nothing() -> None:
    weight = replace(
        gptq(), qweight=torch.full((K // 8, N), -0x77777778, dtype=torch.int32)
    )  # all of them zero
    original = torch.zeros(N, K)
    original[:, 0] = 0.004  # rounds to zero

    found = compared(weight, original)

    assert (found.nonzero, found.agreeing, found.differing) == (N, 0, N)


def test_factors_of_inputs_are_a_part_of_what_a_weight_does() -> None:
    random = torch.Generator().manual_seed(2)
    weight = ModelOptAWQWeight(
        config=ModelOptAWQConfig(16),
        weight=torch.randint(256, (4, K), generator=random, dtype=torch.uint8),
        weight_scale=torch.rand(8, K // 16, generator=random),
        pre_quant_scale=0.5 + torch.rand(K, generator=random),
    )

    rows = weight.get_linear()(torch.eye(K)).T

    assert rows.equal(effective_weight(weight))
