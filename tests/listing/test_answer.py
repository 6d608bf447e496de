"""Verdicts in their order, exit codes, the code of several paths, and the cause of a finding."""

from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import pytest

from qload.errors.verdicts import EXIT_CODES, worst_code
from qload.listing import Answer, cause_of

ORDER = ("unreadable", "findings", "internal", "incomplete", "unsupported")
CODES = {"unreadable": 1, "findings": 1, "internal": 3, "incomplete": 4, "unsupported": 4, "ok": 0}


@dataclass(frozen=True)
class Said(Answer):
    """A report of which some verdicts hold."""

    holds: tuple[str, ...]
    path: str = "a"

    def _readable(self) -> bool:
        return "unreadable" not in self.holds

    def _sound(self) -> bool:
        return "findings" not in self.holds

    def _internal(self) -> bool:
        return "internal" in self.holds

    def _incomplete(self) -> bool:
        return "incomplete" in self.holds

    def _unsupported(self) -> bool:
        return "unsupported" in self.holds

    def _data(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("holds", [each for count in range(6) for each in combinations(ORDER, count)])
def test_the_first_verdict_that_holds_is_taken(holds: tuple[str, ...]) -> None:
    said = Said(holds)
    expected = min(holds, key=ORDER.index, default="ok")

    assert said.verdict == expected
    assert said.exit_code == CODES[expected] == EXIT_CODES[said.verdict]
    assert said.to_json() == {"schema": 2, "path": "a", "verdict": expected}


def test_of_several_paths_the_worst_code_counts() -> None:
    worst_first = [2, 3, 1, 4, 0]
    for count in range(1, 6):
        for codes in permutations(worst_first, count):
            assert worst_code(codes) == min(codes, key=worst_first.index)
    assert worst_code([]) == 0


ONE_CAUSE = [
    pytest.param(
        [("model.layers.0.up.scales: NaN scale nan at (3, 4); 17 in all", "model.layers.0.up.scales"),
         ("lm_head.weight_scale: NaN scale nan at (0,); 1 in all", "lm_head.weight_scale")],
        id="places and counts",
    ),
    pytest.param(
        [("a.0.q.qweight: wrong shape\nexpected (32, 160) = (K*4/32, N)\ngot      (32, 2)\n"
          "in       model-00001-of-00002.safetensors", "a.0.q.qweight"),
         ("a.7.q.qweight: wrong shape\nexpected (8, 96) = (K*4/32, N)\ngot      (8, 16)\n"
          "in       model-00002-of-00002.safetensors", "a.7.q.qweight")],
        id="shapes and files",
    ),
    pytest.param(
        [("model.layers.3.up.weight: equal to model.layers.1.up.weight, byte for byte",
          "model.layers.3.up.weight"),
         ("model.layers.9.down.weight: equal to model.layers.2.down.weight, byte for byte",
          "model.layers.9.down.weight")],
        id="another tensor",
    ),
    pytest.param([("a.b: off by -3.5e-05 of 1e9", "a.b"), ("c: off by 12.5 of 7", "c")], id="values"),
]  # fmt: skip


@pytest.mark.parametrize("findings", ONE_CAUSE)
def test_findings_of_one_cause_have_one_text(findings: list[tuple[str, str]]) -> None:
    causes = {cause_of(message, tensor) for message, tensor in findings}

    assert len(causes) == 1
    assert not any(tensor in cause for _, tensor in findings for cause in causes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.w: NaN scale nan at 3", "a.w: infinite scale inf at 3"),
        ("a.w: wrong dtype int8", "a.w: wrong dtype uint8"),
        ("a.w: config.json says no", "a.w: quantize_config.json says no"),
        ("a.w: missing", "a.w: equal to b.0.w"),
    ],
)
def test_findings_of_two_causes_have_two(one: str, other: str) -> None:
    assert cause_of(one, "a.w") != cause_of(other, "a.w")


def test_a_name_is_left_out_as_a_whole_and_never_a_part_of_another() -> None:
    assert cause_of("a.up: x of a.up.weight and a.upper", "a.up") == "x of *weight and a.upper"
