"""JSON of each kind of report, written out by hand: no layer, world, finding or tensor is left out."""

from typing import Any

import pytest

from qload.checkpoint import Coverage, LayerInfo, ReportBase
from qload.conversion.report import Conversion, ConvertedLayer, ShardedCheckpoint, ShardedLayer
from qload.diff import CheckpointDiff, LayerDiff
from qload.errors import CutError
from qload.plan import Alternative, ExplainedLayer, Explanation, LayerShare, PlannedLayer, ShardingPlan
from qload.plan.kernels import KernelChoice
from qload.plan.rank_counts import LawfulRanks
from qload.plan.report import WorldPlan
from qload.spec import ActivationScheme
from qload.verify.report import Finding, Report

CUT = CutError("a.qzeros", "K", 192, 96, 64, "as qzeros is (K/64 N/8)", 2, (3,))

PLAN = ShardingPlan(
    "p",
    [
        PlannedLayer(
            "a",
            "gptq",
            (64, 192),
            "K",
            {1: LayerShare((7,)), 2: LayerShare((), CUT, (Alternative("whole", "all", 3),))},
        ),
        PlannedLayer("b", None, (), "whole", {1: LayerShare((5,), kernel="no"), 2: LayerShare((5, 6))}),
        PlannedLayer("c", "awq", (8,), "experts", {1: LayerShare((1,)), 2: LayerShare((0, 1))}),
    ],
    {1: WorldPlan(False, 1, "no", (13,)), 2: WorldPlan(False, 2, "cut", (5, 7))},
    "llama",
    ["first", "second"],
    {"x": "why", "y": "why not"},
    "",
    "",
    lawful=LawfulRanks((1, 2), {"a": (1, 2)}),
)
PLAN_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "model": "llama",
    "unread": {"x": "why", "y": "why not"},
    "unreadable": "",
    "unsupported": "",
    "notes": ["first", "second"],
    "lawful": {"ranks": (1, 2), "limits": {"a": (1, 2)}},
    "worlds": {
        "1": {"fits": False, "refused": 1, "reason": "no", "bytes": (13,)},
        "2": {"fits": False, "refused": 2, "reason": "cut", "bytes": (5, 7)},
    },
    "layers": [
        {
            "prefix": "a",
            "format": "gptq",
            "shape": (64, 192),
            "cut": "K",
            "shares": {
                "1": {"fits": True, "bytes": (7,)},
                "2": {
                    "fits": False,
                    "bytes": (),
                    "reason": str(CUT),
                    "alternatives": [{"kind": "whole", "text": "all", "bytes": 3}],
                },
            },
        },
        {
            "prefix": "b",
            "format": None,
            "shape": (),
            "cut": "whole",
            "shares": {
                "1": {"fits": False, "bytes": (5,), "reason": "no", "alternatives": []},
                "2": {"fits": True, "bytes": (5, 6)},
            },
        },
        {
            "prefix": "c",
            "format": "awq",
            "shape": (8,),
            "cut": "experts",
            "shares": {"1": {"fits": True, "bytes": (1,)}, "2": {"fits": True, "bytes": (0, 1)}},
        },
    ],
}

EXPLANATION = Explanation(
    "p",
    "sm90",
    2,
    "float16",
    [
        ExplainedLayer(
            "a",
            "gptq",
            (8, 16),
            "strips",
            {"panels": "only the CPU module reads it"},
            (KernelChoice(1, "decode", {"many": "slower"}, 2e-6, "timed"), KernelChoice(64, "many")),
            ("change",),
            "",
            4,
        ),
        ExplainedLayer("b", None, (), error="damaged"),
    ],
    ["note"],
    {"x": "why"},
    "",
    "",
)
EXPLANATION_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "arch": "sm90",
    "tp": 2,
    "dtype": "float16",
    "layers": [
        {
            "prefix": "a",
            "format": "gptq",
            "shape": (8, 16),
            "kernel_format": "strips",
            "formats": {"panels": "only the CPU module reads it"},
            "choices": (
                {
                    "tokens": 1,
                    "kernel": "decode",
                    "refused": {"many": "slower"},
                    "seconds": 2e-6,
                    "basis": "timed",
                },
                {"tokens": 64, "kernel": "many", "refused": {}, "seconds": None, "basis": ""},
            ),
            "changes": ("change",),
            "error": "",
            "bits": 4,
        },
        {
            "prefix": "b",
            "format": None,
            "shape": (),
            "kernel_format": None,
            "formats": {},
            "choices": (),
            "changes": (),
            "error": "damaged",
            "bits": None,
        },
    ],
    "notes": ["note"],
    "unread": {"x": "why"},
    "unreadable": "",
    "unsupported": "",
}

DIFF = CheckpointDiff(
    "p",
    "q",
    [
        LayerDiff("a", "A", "bits", "", 0, 6),
        LayerDiff("b", None, "missing", "in p only"),
        LayerDiff("c", "c", "differs", "first at (0, 1)", 2, 6),
        LayerDiff("d", "d", "unread", "no format"),
        LayerDiff("e", "e", "bits", "", 0, 1),
    ],
)
DIFF_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "counts": {"bits": 2, "missing": 1, "differs": 1, "unread": 1},
    "other": "q",
    "layers": [
        {"name": "a", "other": "A", "outcome": "bits", "detail": "", "differing": 0, "total": 6},
        {"name": "b", "other": None, "outcome": "missing", "detail": "in p only", "differing": 0, "total": 0},
        {
            "name": "c",
            "other": "c",
            "outcome": "differs",
            "detail": "first at (0, 1)",
            "differing": 2,
            "total": 6,
        },
        {"name": "d", "other": "d", "outcome": "unread", "detail": "no format", "differing": 0, "total": 0},
        {"name": "e", "other": "e", "outcome": "bits", "detail": "", "differing": 0, "total": 1},
    ],
    "unreadable": "",
    "unsupported": "",
}

CONVERSION = Conversion(
    "p",
    "f",
    "awq",
    [ConvertedLayer("a", "gptq", "awq", "rounded"), ConvertedLayer("b", None, None, "refused", "why")],
    ["note"],
    findings=[Finding("rule", "error", "b.x", "f.safetensors", "b.x: off", "mend", "cause")],
)
CONVERSION_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "counts": {"rounded": 1, "refused": 1},
    "folder": "f",
    "to": "awq",
    "layers": [
        {"name": "a", "source": "gptq", "format": "awq", "outcome": "rounded", "detail": ""},
        {"name": "b", "source": None, "format": None, "outcome": "refused", "detail": "why"},
    ],
    "notes": ["note"],
    "findings": [
        {
            "rule": "rule",
            "severity": "error",
            "tensor": "b.x",
            "file": "f.safetensors",
            "message": "b.x: off",
            "remedy": "mend",
            "cause": "cause",
        }
    ],
    "unreadable": "",
    "unsupported": "",
}

REPORT = Report(
    "p",
    [
        Finding("rule", "error", "a.x", "f.safetensors", "a.x: off", "mend", "cause"),
        Finding("other", "warning", None, None, "odd", "", "cause of the other"),
    ],
    ["note"],
    [
        LayerInfo(
            "a",
            "gptq",
            4,
            64,
            True,
            False,
            (8, 64),
            "float16",
            300,
            scale_dtype="float16",
            expected=(8, 65),
            activations=ActivationScheme("int", 8, True, "token"),
            excluded="by a rule",
        ),
        LayerInfo("b", None, None, None, None, None, (), "", 7),
    ],
    {"bits": 4},
    Coverage(2, 3, 100, 50, {"rope": 20, "copies": 5}, 10, 8, 7),
    {"largest": 0.5},
    Coverage(0, 0, 1, 1, {}, 0, 0, 0),
    {"a": "map"},
)
REPORT_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "findings": [
        {
            "rule": "rule",
            "severity": "error",
            "tensor": "a.x",
            "file": "f.safetensors",
            "message": "a.x: off",
            "remedy": "mend",
            "cause": "cause",
        },
        {
            "rule": "other",
            "severity": "warning",
            "tensor": None,
            "file": None,
            "message": "odd",
            "remedy": "",
            "cause": "cause of the other",
        },
    ],
    "notes": ["note"],
    "claims": {"bits": 4},
    "coverage": {
        "layers": 2,
        "plain_tensors": 3,
        "total": 100,
        "read": 50,
        "exempt": {"rope": 20, "copies": 5},
        "unread": 10,
        "refused": 8,
        "unexplained": 7,
        "explained": 75,
    },
    "layers": [
        {
            "prefix": "a",
            "format": "gptq",
            "bits": 4,
            "group_size": 64,
            "sym": True,
            "act_order": False,
            "shape": (8, 64),
            "dtype": "float16",
            "bytes": 300,
            "scale_dtype": "float16",
            "expected": (8, 65),
            "excluded": "by a rule",
            "activations": {
                "type": "int",
                "bits": 8,
                "dynamic": True,
                "strategy": "token",
                "group_size": None,
                "symmetric": True,
                "scale": None,
                "zero_point": None,
                "scale_type": "float32",
                "upper_bound": None,
                "owner": "compressed-tensors",
            },
        },
        {
            "prefix": "b",
            "format": None,
            "bits": None,
            "group_size": None,
            "sym": None,
            "act_order": None,
            "shape": (),
            "dtype": "",
            "bytes": 7,
            "scale_dtype": None,
            "expected": None,
            "excluded": None,
            "activations": None,
        },
    ],
    "logits": {"largest": 0.5},
    "reference_coverage": {
        "layers": 0,
        "plain_tensors": 0,
        "total": 1,
        "read": 1,
        "exempt": {},
        "unread": 0,
        "refused": 0,
        "unexplained": 0,
        "explained": 1,
    },
}

SHARDED = ShardedCheckpoint(
    "p",
    "f",
    2,
    4,
    [ShardedLayer("a", "gptq", "N", "bits"), ShardedLayer("b", None, "whole", "differs", "at (0, 1)")],
    ["note"],
)
SHARDED_JSON = {
    "schema": 2,
    "path": "p",
    "verdict": "findings",
    "counts": {"bits": 1, "differs": 1},
    "folder": "f",
    "tp": 2,
    "ep": 4,
    "layers": [
        {"name": "a", "format": "gptq", "cut": "N", "outcome": "bits", "detail": ""},
        {"name": "b", "format": None, "cut": "whole", "outcome": "differs", "detail": "at (0, 1)"},
    ],
    "notes": ["note"],
    "unreadable": "",
    "unsupported": "",
}
CASES: list[tuple[ReportBase, dict[str, Any]]] = [
    (PLAN, PLAN_JSON),
    (EXPLANATION, EXPLANATION_JSON),
    (DIFF, DIFF_JSON),
    (CONVERSION, CONVERSION_JSON),
    (SHARDED, SHARDED_JSON),
    (REPORT, REPORT_JSON),
]


@pytest.mark.parametrize(("report", "expected"), CASES, ids=lambda each: type(each).__name__)
def test_the_json_of_a_report_by_hand(report: ReportBase, expected: dict[str, Any]) -> None:
    assert report.to_json() == expected


def test_every_kind_of_report_has_a_case() -> None:
    def kinds(kind: type[ReportBase]) -> set[type[ReportBase]]:
        found = {kind} if not kind.__abstractmethods__ and kind.__module__.startswith("qload.") else set()
        return found.union(*(kinds(each) for each in kind.__subclasses__()))

    assert kinds(ReportBase) == {type(report) for report, _ in CASES}


@pytest.mark.parametrize("kind", ["unreadable", "unsupported"])
@pytest.mark.parametrize(
    "report", [PLAN, EXPLANATION, DIFF, CONVERSION, SHARDED], ids=lambda each: type(each).__name__
)
def test_a_checkpoint_that_is_not_read_has_the_reason_in_its_json(report: ReportBase, kind: str) -> None:
    other = "q" if isinstance(report, CheckpointDiff) else ""
    empty = type(report)("p", **({"other": other} if other else {}), **{kind: "the reason"})  # type: ignore[call-arg]

    told = empty.to_json()

    assert (told["verdict"], told[kind]) == (kind, "the reason")
    assert told["layers"] in ([], ())
