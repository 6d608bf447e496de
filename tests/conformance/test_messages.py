"""Mistakes that no class has, and adapters that answer with something else: told as what they are."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

import qload.conformance.suites as suite_module
from qload.conformance import ConformanceCase, cases
from qload.conformance.expert_checks import ExpertChecks
from qload.conformance.linear_checks import LinearChecks
from qload.conformance.loader_checks import LoaderChecks
from qload.conformance.suites import CaseRun, ask_support
from tests.conformance.subjects import Sound, message
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

    with pytest.raises(pytest.fail.Exception) as caught:
        ask_support(suite, COMMON)

    assert str(caught.value) == f"can_implement returned {said!r}, expected (whether, why not)"
    assert not caught.value.pytrace


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
def test_experts_are_told_what_is_known_of_them(
    suite: type[Experts], check: str, says: str, golden: SnapshotAssertion
) -> None:
    with pytest.raises(AssertionError, match=says) as caught:
        getattr(ExpertChecks(suite(), Experts.cases("smoke")[0], "cpu"), check)()

    assert message(caught.value) == golden


@pytest.mark.parametrize("said", [None, []], ids=str)
def test_a_load_that_is_no_tensors_by_name_is_told(said: Any, tmp_path: Path) -> None:
    suite = type("Any", (Loads,), {"load": lambda self, files, rank, world: said})()

    with pytest.raises(AssertionError, match=r"load returned .*, expected tensors by name"):
        LoaderChecks(suite, Loads.cases("smoke")[0], tmp_path).shares_are_exact()


def test_no_suite_passes_where_asserts_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_module, "ASSERTS", False)
    request: Any = SimpleNamespace()

    with pytest.raises(pytest.fail.Exception) as caught:
        CaseRun(Sound(), COMMON, request, LinearChecks)

    assert str(caught.value) == "python -O leaves out assert statements, and so some of the checks"
    assert not caught.value.pytrace


class WideFails:
    """A check that fails from a number of weights on, and skips the smallest case."""

    def __init__(self, case: ConformanceCase, least: int) -> None:
        self.case, self.least = case, least

    def fits(self) -> dict[str, int]:
        size = self.case.N * self.case.K
        if size == min(each.N * each.K for each in cases("gptq")):
            pytest.skip("too small")
        if size >= self.least:
            raise AssertionError(f"{self.case.K} inputs are too many")
        return {"size": size}


@pytest.mark.parametrize(
    ("of", "least", "failed", "inputs"),
    [
        (".k512n256", 0, "gptq.v1.w4.g128.k384n192", 384),
        (".k512n256", 1 << 17, "gptq.v1.w4.g128.k512n256", 512),
        (".k2048n64", 0, "gptq.v1.w4.g128.k384n192", 384),
        (".k384n192", 0, "gptq.v1.w4.g128.k384n192", 384),
        (".k512n256.tp2col", 1 << 17, "gptq.v1.w4.g128.k512n256.tp2col", 512),
        (".k2048n1536", 1 << 20, "gptq.v1.w4.g128.k4096n512", 4096),
        (".k512n256", 1 << 18, None, 0),
    ],
)
def test_a_failure_names_the_smallest_case_that_fails_too(
    of: str, least: int, failed: str | None, inputs: int
) -> None:
    case = next(each for each in cases("gptq", "exhaustive") if each.id == f"gptq.v1.w4.g128{of}")
    node = SimpleNamespace(nodeid=f"t.py::test[{case.id}]", user_properties=[])
    config = SimpleNamespace(getoption=lambda name, default: default)
    request: Any = SimpleNamespace(node=node, config=config)
    run = CaseRun(Sound(), case, request, lambda case, device: WideFails(case, least))
    ((name, report),) = node.user_properties

    if failed is None:
        run.check("fits")
        described = {"suite": "Sound", "kind": "LinearKernelSuite", "subject": "Sound"}
        assert (name, report) == ("qload", {"case": case.id, **described, "size": case.N * case.K})
        return
    with pytest.raises(pytest.fail.Exception) as caught:
        run.check("fits")
    text = f"{inputs} inputs are too many"
    assert str(caught.value).splitlines()[0] == f"{failed}: {text}"
    replay = str(caught.value).splitlines()[1].strip()
    tier = " --qload-tier=gpu" if inputs == 4096 else ""
    assert replay == f"replay    pytest 't.py::test[{failed}]'{tier}"
    entries = {name: report[name] for name in ("case", "failure", "fault", "replay")}
    assert entries == {
        "case": case.id,
        "failure": text,
        "fault": None,
        "replay": replay.removeprefix("replay").strip(),
    }


def test_the_smallest_case_is_one_that_the_subject_takes() -> None:
    class Refuses(Sound):
        def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
            return case.K != 384, "no 384 inputs"

    case = next(each for each in cases("gptq") if each.id == "gptq.v1.w4.g128.k512n256")
    node = SimpleNamespace(nodeid=f"t.py::test[{case.id}]", user_properties=[])
    request: Any = SimpleNamespace(node=node, config=SimpleNamespace(getoption=lambda name, default: default))

    with pytest.raises(pytest.fail.Exception, match=rf"^{case.id}: 512 inputs are too many\n"):
        CaseRun(Refuses(), case, request, lambda case, device: WideFails(case, 0)).check("fits")
