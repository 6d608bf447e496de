"""`LinearKernelSuite`: sound kernels of every format pass, and each bug is caught and named."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload.conformance import ConformanceCase, cases
from qload.conformance.linear_checks import LinearChecks
from qload.conformance.suites import CaseRun
from qload.testing.traits import CONTRACTS
from tests.conformance.subjects import WEIGHTS, Buggy, Parts, Sound, message, with_bug

CHECKS = (
    "reads_back",
    "sums_exactly",
    "stays_within_the_bound",
    "says_the_same_twice",
    "keeps_to_its_buffers",
    "rows_do_not_mix",
    "packing_leaves_the_weight_alone",
)
GPTQ = {case.id: case for case in cases("gptq")}
COMMON = GPTQ["gptq.v1.w4.g128.k256n128"]


class Plain(Sound):
    """Takes the weight's own meaning, as formats without codes have it."""

    def pack(self, weight: Any) -> Any:
        return weight.dequantize()

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return (x.float() @ buffers.to(x.dtype).float().T).to(x.dtype)


def on_trial(subject: Sound, case: ConformanceCase, check: str) -> Any:
    return getattr(LinearChecks(subject, case, "cpu"), check)()


@pytest.mark.parametrize("format", CONTRACTS)
def test_a_sound_kernel_of_every_format_passes(format: str) -> None:
    suite = type("Any", (Plain,), {"format": format})()
    for case in cases(format, "smoke"):
        for check in CHECKS:
            with contextlib.suppress(pytest.skip.Exception):  # of sums that float32 cannot hold
                on_trial(suite, case, check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", [*GPTQ.values()][:20:2] + [*GPTQ.values()][20::5], ids=str)
def test_a_sound_kernel_of_its_own_passes(case: ConformanceCase, check: str) -> None:
    on_trial(Sound(), case, check)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_wrong_weight_is_caught_and_its_fault_named(name: str, golden: SnapshotAssertion) -> None:
    _, fault, case = WEIGHTS[name]

    with pytest.raises(AssertionError, match="cause ") as caught:
        on_trial(with_bug(name), GPTQ[case], "reads_back")

    assert caught.value.diagnosis.fault == fault, str(caught.value)
    assert message(caught.value) == golden


@pytest.mark.parametrize("check", ["sums_exactly", "stays_within_the_bound"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_other_oracles_see_it_too(name: str, check: str) -> None:
    with pytest.raises(AssertionError):
        on_trial(with_bug(name), GPTQ[WEIGHTS[name][2]], check)


class Rank0(Sound):
    """Cuts a fused whole for rank 0 on every rank: it keeps the first share that it packed."""

    first: Any = None

    def pack(self, weight: Any) -> Any:
        self.first = self.first or super().pack(weight)
        return self.first


def test_the_share_of_rank_0_on_every_rank_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2") as caught:
        on_trial(Rank0(), GPTQ["gptq.v1.w4.g128.k512n256.tp2row"], "reads_back")

    assert caught.value.diagnosis.fault == "rank-0-everywhere"


class LaterRanks(Sound):
    """Doubles the scales of every share but the first."""

    packed = 0

    def pack(self, weight: Any) -> Any:
        made = super().pack(weight)
        self.packed += 1
        return made if self.packed == 1 else replace(made, scales=2 * made.scales)


@pytest.mark.parametrize("split", ["col", "row"])
@pytest.mark.parametrize("check", ["reads_back", "sums_exactly", "stays_within_the_bound"])
def test_the_shares_of_all_ranks_are_on_trial(check: str, split: str) -> None:
    with pytest.raises(AssertionError, match="rank 1 of 2"):
        on_trial(LaterRanks(), GPTQ[f"gptq.v1.w4.g128.k512n256.tp2{split}"], check)


class OfManyTokens(Sound):
    """Wrong for more than 16 tokens."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        y[16:, -1] = 0
        return y


class NarrowSums(Sound):
    """Adds in float16."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y, w = torch.zeros(x.shape[0], len(buffers.codes)).half(), buffers.weight().half()
        for k in range(0, x.shape[1], 4):
            y += x[:, k : k + 4].half() @ w[:, k : k + 4].T
        return y.to(x.dtype)


class Leftover(Sound):
    """Leaves the last output to whoever had the memory."""

    calls = 0

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        self.calls += 1
        y[-1, -1] += self.calls
        return y


class WritesX(Sound):
    """Quantizes its inputs in place."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        x.mul_(2)
        return y


class WritesBehind(Sound):
    """Writes one element behind x."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        if x.untyped_storage().nbytes() > x.numel() * x.element_size():
            torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()).fill_(1)
        return y


class ReadsBehind(Sound):
    """Reads one element behind x, and multiplies it by zero, which NaN survives."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        if x.untyped_storage().nbytes() > x.numel() * x.element_size():
            y += torch.as_strided(x, (1,), (1,), x.storage_offset() + x.numel()) * 0
        return y


class MixesRows(Sound):
    """Scales all tokens by the largest one."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        most = x.abs().max().float()
        return ((x.float() / most) @ buffers.weight().to(x.dtype).float().T * most).to(x.dtype)


class LosesNaN(Sound):
    """Clamps what it returns."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x.nan_to_num(0.0), buffers)


class ShiftsWeight(Sound):
    """Shuffles the weight that it was given in place."""

    def pack(self, weight: Any) -> Any:
        made = super().pack(weight)
        weight.scales.mul_(2)
        return made


class ForgetsGroups(Buggy):
    """Keeps a count of layers in what it packs."""

    count = 0

    def pack(self, weight: Any) -> Any:
        self.count += 1
        return [super(Buggy, self).pack(weight).scales + self.count]


@pytest.mark.parametrize(
    ("subject", "check", "says"),
    [
        (OfManyTokens, "sums_exactly", r"^M = 17: y\[16, 127\] is 0, the exact sum is"),
        (OfManyTokens, "reads_back", "cause"),
        (NarrowSums, "sums_exactly", "the exact sum is"),
        (NarrowSums, "stays_within_the_bound", "times as far off as rounding can cost"),
        (Leftover, "says_the_same_twice", "1 of 128 differ, first at"),
        (WritesX, "keeps_to_its_buffers", "the kernel wrote into x: "),
        (WritesBehind, "keeps_to_its_buffers", "the kernel wrote behind x: 2 bytes differ, .* at byte 0"),
        (ReadsBehind, "keeps_to_its_buffers", "nan times as far off"),
        (MixesRows, "rows_do_not_mix", "M = 2: NaN in token 1 reaches token 0"),
        (LosesNaN, "rows_do_not_mix", "NaN in token 1 is lost"),
        (ShiftsWeight, "packing_leaves_the_weight_alone", "packing changes the weight's scales: "),
        (ForgetsGroups, "packing_leaves_the_weight_alone", "packed twice, the buffers differ: "),
    ],
)
def test_a_bug_outside_of_the_weight_is_caught(
    subject: type[Sound], check: str, says: str, golden: SnapshotAssertion
) -> None:
    case = ConformanceCase(**{**vars(COMMON), "K": 512}) if subject is NarrowSums else COMMON

    with pytest.raises(AssertionError, match=says) as caught:
        # A copy that no other test shares, as one of them writes into its weight.
        on_trial(subject(), ConformanceCase(**{**vars(case), "N": 128}), check)

    assert message(caught.value) == golden


def test_how_a_kernel_adds_widens_the_bound() -> None:
    told = type("Told", (NarrowSums,), {"accumulate": "float16"})()

    assert on_trial(told, COMMON, "stays_within_the_bound")["error of bound"] <= 1
    with pytest.raises(pytest.skip.Exception, match="narrower type"):
        on_trial(told, COMMON, "sums_exactly")


@pytest.mark.parametrize("subject", [Sound, type("Parallel", (Sound,), {"threads": 2})])
def test_torch_has_the_threads_that_the_suite_says(
    subject: type[Sound], request: pytest.FixtureRequest
) -> None:
    seen: list[int] = []
    checks = SimpleNamespace(reads_back=lambda: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()

    CaseRun(subject(), COMMON, request, lambda case, device: checks).check("reads_back")

    assert seen == [subject.threads]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("answer", "skipped"),
    [
        pytest.param((True, ""), None, id="taken"),
        pytest.param((True, "slowly"), None, id="taken with a remark"),
        pytest.param((False, "no act order"), "no act order", id="refused"),
        pytest.param((False, ""), "the subject refuses it without a reason", id="refused without a reason"),
    ],
)
def test_what_is_taken_runs_and_what_is_refused_is_skipped(
    answer: tuple[bool, str], skipped: str | None, request: pytest.FixtureRequest
) -> None:
    subject = type("Answers", (Sound,), {"can_implement": lambda self, case: answer})()
    runs: list[str] = []
    said: str | None = None
    try:
        CaseRun(
            subject,
            COMMON,
            request,
            lambda case, device: SimpleNamespace(reads_back=lambda: runs.append("reads_back")),
        ).check("reads_back")
    except pytest.skip.Exception as skip:
        said = skip.msg

    assert (said, runs) == (skipped, [] if skipped else ["reads_back"])


class TakesMore(Sound):
    """A kernel with one more packed tensor at each call."""

    count = 0

    def pack(self, weight: Any) -> Any:
        self.count += 1
        return [weight.scales] * self.count


def test_packings_of_unequal_numbers_of_tensors_are_caught() -> None:
    with pytest.raises(AssertionError) as caught:
        on_trial(TakesMore(), COMMON, "packing_leaves_the_weight_alone")

    assert message(caught.value) == "packed twice, there are other tensors"


NO_CUT = ConformanceCase(**{**vars(cases("awq")[0]), "world": 4, "split": "row"})


@pytest.mark.parametrize(
    ("options", "case", "check", "reason"),
    [
        (
            {"accumulate": "float16"},
            COMMON,
            "sums_exactly",
            "the kernel adds in a narrower type than float32, whose sums are not exact",
        ),
        (
            {"partials": "float16"},
            COMMON,
            "sums_exactly",
            "the kernel adds in a narrower type than float32, whose sums are not exact",
        ),
        (
            {"deterministic": False},
            COMMON,
            "says_the_same_twice",
            "the suite says that the kernel is not deterministic",
        ),
        (
            {},
            NO_CUT,
            "reads_back",
            "the format has no such cut: layer.qzeros: cannot cut K = 256 at 64 for 4 ranks",
        ),
    ],
)
def test_a_check_is_skipped_with_the_reason(
    options: dict[str, Any], case: ConformanceCase, check: str, reason: str
) -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        on_trial(type("Other", (Sound,), options)(), case, check)

    assert caught.value.msg == reason


def test_a_failure_is_told_once(request: pytest.FixtureRequest) -> None:
    run = CaseRun(
        with_bug("zero-plus-one"),
        COMMON,
        request,
        lambda case, device: LinearChecks(run.suite, case, device),
    )

    with pytest.raises(pytest.fail.Exception, match=r"^gptq.v1.w4.g128.k256n128: the kernel has ") as caught:
        run.check("reads_back")

    assert caught.value.__context__ is None
    assert not caught.value.pytrace
    assert run.report["fault"] == "zero-points-one-higher"


def test_parts_are_what_the_weight_means() -> None:
    made = Parts(torch.tensor([[3, 1]]), torch.tensor([[1]]), torch.tensor([[0.5]]), torch.tensor([0, 0]))

    assert made.weight().tolist() == [[1.0, 0.0]]
