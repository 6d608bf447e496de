"""Mistakes that no class has, and adapters that answer with something else: told as what they are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import qload.conformance.suites as suite_module
from qload.conformance import cases
from qload.conformance.expert_checks import ExpertChecks
from qload.conformance.linear_checks import LinearChecks
from qload.conformance.loader_checks import LoaderChecks
from qload.conformance.suites import CaseRun, ask_support
from tests.conformance.subjects import Sound
from tests.conformance.test_linear import COMMON, on_trial
from tests.conformance.test_suites import Experts, Loads, NextExpert


class TurnedTokens(Sound):
    """Has the tokens of a tile in the reverse order."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        y = super().gemm(x, buffers)
        return y.flip(0) if len(y) > 16 else y


class TurnedInputs(Sound):
    """Has the inputs in the reverse order, of however many tokens."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x.flip(1), buffers)


class RoundedUp(Sound):
    """Multiplies by a weight that is a rounding too large."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, buffers) * (1 + torch.finfo(x.dtype).eps)


@pytest.mark.parametrize(
    ("suite", "fault", "says"),
    [
        (TurnedTokens, None, "what comes of a token depends on its place among the others"),
        (TurnedInputs, "outputs-reversed", "inputs in the reverse order"),
        (RoundedUp, None, "cause     rounding: by no more than two roundings to torch.float16 cost"),
    ],
)
def test_a_weight_is_not_blamed_for_what_tokens_or_rounding_do(suite: Any, fault: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        on_trial(suite(), COMMON, "reads_back")

    assert caught.value.diagnosis.fault == fault


class WithoutSign(Sound):
    """Takes scales for positive."""

    def pack(self, weight: Any) -> Any:
        made = super().pack(weight)
        return replace(made, scales=made.scales.abs())


@pytest.mark.parametrize("format", ["gptq", "awq", "ct_pack"])
def test_scales_of_integers_have_either_sign(format: str) -> None:
    suite = type("Any", (WithoutSign,), {"format": format})()

    with pytest.raises(AssertionError, match="as far off as rounding can cost"):
        on_trial(suite, cases(format, "smoke")[0], "stays_within_the_bound")


class ReturnsNothing(Sound):
    """Has forgotten its `return`."""

    def gemm(self, x: Tensor, buffers: Any) -> Any:
        super().gemm(x, buffers)


@pytest.mark.parametrize("check", ["reads_back", "sums_exactly", "rows_do_not_mix"])
def test_a_product_that_is_no_tensor_is_told(check: str) -> None:
    with pytest.raises(AssertionError, match="gemm returned NoneType, expected a tensor"):
        on_trial(ReturnsNothing(), COMMON, check)


@pytest.mark.parametrize("said", [True, None, (True,)], ids=str)
def test_an_answer_that_is_no_pair_is_told(said: Any) -> None:
    suite = type("Any", (Sound,), {"can_implement": lambda self, case: said})()

    with pytest.raises(pytest.fail.Exception, match="expected \\(whether, why not\\)"):
        ask_support(suite, COMMON)


class Evenly(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, ids, torch.full_like(weights, 1 / weights.shape[1]), buffers)


class FirstExpert(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, torch.arange(ids.shape[1]).expand(ids.shape), weights, buffers)


class MakesNaN(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Tensor:
        return super().gemm(x, ids, weights, buffers).index_fill(0, torch.tensor([0]), torch.nan)


class ForgetsToReturn(Experts):
    def gemm(self, x: Tensor, ids: Tensor, weights: Tensor, buffers: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("suite", "check", "says"),
    [
        (NextExpert, "stays_within_the_bound", r"cause     every token goes to expert e \+ 1"),
        (FirstExpert, "each_expert_alone", r"expert 1: .*\n  cause     tokens of expert 1 go to expert 0"),
        (Evenly, "stays_within_the_bound", "cause     no known one"),
        (MakesNaN, "stays_within_the_bound", "cause     no known one"),
        (ForgetsToReturn, "each_expert_alone", "gemm returned NoneType, expected a tensor"),
    ],
)
def test_experts_are_told_what_is_known_of_them(suite: type[Experts], check: str, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        getattr(ExpertChecks(suite(), Experts.cases("smoke")[0], "cpu"), check)()


@pytest.mark.parametrize("said", [None, []], ids=str)
def test_a_load_that_is_no_tensors_by_name_is_told(said: Any, tmp_path: Path) -> None:
    suite = type("Any", (Loads,), {"load": lambda self, files, rank, world: said})()

    with pytest.raises(AssertionError, match=r"load returned .*, expected tensors by name"):
        LoaderChecks(suite, Loads.cases("smoke")[0], tmp_path).shares_are_exact()


def test_no_suite_passes_where_asserts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module, "ASSERTS", False)
    request: Any = SimpleNamespace()

    with pytest.raises(pytest.fail.Exception, match="leaves out assert statements"):
        CaseRun(Sound(), COMMON, request, LinearChecks)
