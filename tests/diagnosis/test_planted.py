"""Faults planted in stored tensors and in products, without a thought of the diagnosis, are named."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import Weight
from qload.diagnosis import FAULT_CLASSES, Diagnosis, diagnose
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.matrix import SAMPLE_WEIGHTS, K, N

MOST_UNNAMED = 0.1
SOUND = {name: made() for name, made in SAMPLE_WEIGHTS.items()}


def read_back(fault: KernelFault, weight: Weight) -> Tensor | None:
    """What one-hot inputs show of a plain kernel with this fault; None where it changes nothing."""
    packed = fault.packed(weight)
    if packed is None:
        return None
    held = packed.dequantize()
    return fault.gemm(lambda x: x @ held.T, N)(torch.eye(K)).T


def planted(name: str) -> Iterator[tuple[KernelFault, Diagnosis]]:
    weight = SOUND[name]
    meant = weight.dequantize()
    for fault in KERNEL_FAULTS:
        got = read_back(fault, weight)
        if got is not None and not torch.equal(got, meant):
            world = 2 if fault.name == "share-of-rank-0" else None
            yield fault, diagnose(meant, got, weight, world=world)


def confusions(name: str) -> str:
    """Check the diagnoses of planted faults; return a line for each, with classes of the same numbers."""
    found = list(planted(name))
    wrongly = {
        fault.name: told.fault
        for fault, told in found
        if told.fault is not None and not {told.fault, *told.also} & {*fault.classes}
    }
    unnamed = [fault.name for fault, told in found if told.fault is None]

    assert wrongly == {}
    assert len(found) > 15
    assert len(unnamed) <= MOST_UNNAMED * len(found), unnamed
    return "\n".join(" ".join((fault.name, str(told.fault), *told.also)) for fault, told in found)


def test_faults_planted_in_zero_points_are_named_and_none_is_called_another(golden: Any) -> None:
    assert confusions("gptq-zeros") == golden


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SOUND.keys() - {"gptq-zeros"}))
def test_planted_faults_are_named_and_none_is_called_another(name: str, golden: Any) -> None:
    assert confusions(name) == golden


def test_every_class_that_a_planted_fault_claims_is_one() -> None:
    assert {name for fault in KERNEL_FAULTS for name in fault.classes} <= FAULT_CLASSES.keys()
    assert len({fault.name for fault in KERNEL_FAULTS}) == len(KERNEL_FAULTS)


MEANT = SOUND["gptq-zeros"].dequantize()
CODES = SOUND["gptq-zeros"].codes()
RANDOM = torch.Generator().manual_seed(5)
NOISE, SIGNS = torch.randn(N, K, generator=RANDOM), torch.randint(2, (N, K), generator=RANDOM) * 2 - 1


def squared() -> Tensor:
    return MEANT.square()


def rows_shuffled() -> Tensor:
    return MEANT[torch.randperm(N, generator=torch.Generator().manual_seed(1))]


def inputs_shuffled() -> Tensor:
    return MEANT[:, torch.randperm(K, generator=torch.Generator().manual_seed(1))]


def clipped() -> Tensor:
    most = MEANT.abs().median().item()
    return MEANT.clamp(-most, most)


def of_codes(change: Callable[[Tensor], Tensor]) -> Tensor:
    plain = change(CODES.plain().int())
    assert CODES.zeros is not None
    assert CODES.k_group is not None
    return (plain - CODES.zeros[:, CODES.k_group]) * CODES.scales[:, CODES.k_group]


def scattered(value: float) -> Tensor:
    got = MEANT.clone()
    got[torch.rand(N, K, generator=torch.Generator().manual_seed(9)) < 0.02] = value
    return got


OUTSIDE: dict[str, Callable[[], Tensor]] = {
    "noise": lambda: NOISE,
    "a little noise": lambda: MEANT + 0.01 * NOISE,
    "signs at random": lambda: MEANT * SIGNS,
    "squares": squared,
    "clipped": clipped,
    "outputs shuffled": rows_shuffled,
    "inputs shuffled": inputs_shuffled,
    "three bits of four": lambda: of_codes(lambda codes: codes & 14),
    "codes doubled": lambda: of_codes(lambda codes: codes * 2 % 16),
    "gray codes": lambda: of_codes(lambda codes: codes ^ codes >> 1),
    "codes from the end": lambda: of_codes(lambda codes: 15 - codes),
    "codes one higher": lambda: of_codes(lambda codes: (codes * 5 + 3) % 16),
    "codes of another layer": lambda: of_codes(lambda codes: codes.flip(0)),
    "scattered zeros": lambda: scattered(0.0),
    "scattered ones": lambda: scattered(1.0),
    "a factor for each output": lambda: (
        MEANT * (1 + torch.rand(N, 1, generator=torch.Generator().manual_seed(2)))
    ),
    "a factor for each input": lambda: (
        MEANT * (1 + torch.rand(1, K, generator=torch.Generator().manual_seed(2)))
    ),
    "a constant added": lambda: MEANT + 0.5,
    "outputs five on": lambda: MEANT.roll(5, 0),
    "a chessboard of signs": lambda: MEANT * (1 - 2 * ((torch.arange(N)[:, None] + torch.arange(K)) % 2)),
    "absolute values": lambda: MEANT.abs(),
    "bent by less than half a type rounds": lambda: MEANT.tanh(),
    "the mean of neighbours": lambda: (MEANT + MEANT.roll(1, 1)) / 2,
}


@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_fault_of_no_class_is_not_given_one(outside: str) -> None:
    found = diagnose(MEANT, OUTSIDE[outside](), SOUND["gptq-zeros"])

    assert found.fault is None, found.sentence
    assert found.wrong
    assert found.sentence.startswith("a fault of no known class")
