"""Internal errors of rules: a finding at the tensor in question; other rules and layers continue."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qload.errors import StorageError
from qload.errors.rules import RuleText
from qload.verify import Finding, Report, inspect, run_rules, verification, verify
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.rules import INSPECTED, RULES
from qload.verify.rules.rule import Rule
from tests.verify.checkpoints import GPTQ, gptq, model

MADE_UP = RuleText(id="made-up", stage="headers", what="", why="", do="Mend it.")
LAYERS = [f"model.layers.{at}.up_proj" for at in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return three GPTQ layers; the zero point of the last one causes a finding of `symmetry`."""
    tensors = {name: each for at, prefix in enumerate(LAYERS) for name, each in gptq(prefix).items()}
    return model(tmp_path, {**tensors, **gptq(LAYERS[2], zero=8)}, quantization_config=GPTQ)


def raising(rule: Rule, error: Exception, only: str | None = None) -> Rule:
    """Return the rule with an error at the layer or tensor `only`, or at once; it has no findings then."""

    def check(own: Rule, subject: VerifiedCheckpoint) -> Iterator[Finding]:
        if only is None or only in subject.layers or only in subject.readable_names:
            raise error
        yield from rule.check(own, subject)

    return replace(rule, check=check)


def use(monkeypatch: pytest.MonkeyPatch, rules: tuple[Rule, ...]) -> None:
    monkeypatch.setattr(run_rules, "RULES", rules)


def without_internal(report: Report) -> list[Finding]:
    return [finding for finding in report.findings if finding.rule != "internal"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_each_rule_may_raise_and_all_others_find_what_they_did(
    rule: Rule, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verify(folder)
    use(monkeypatch, tuple(raising(each, KeyError("G")) if each is rule else each for each in RULES))

    after = verify(folder)

    bugs = [finding for finding in after.findings if finding.rule == "internal"]
    assert bugs
    assert all(f"{rule.id}: internal error, KeyError: 'G'" in finding.message for finding in bugs)
    assert all(finding.severity == "error" and finding.remedy for finding in bugs)
    assert without_internal(after) == [each for each in before.findings if each.rule != rule.id]
    assert after.verdict == ("findings" if without_internal(after) else "internal")
    assert after.notes == before.notes
    assert after.layers == before.layers


def test_the_layer_that_raises_is_named_and_the_others_are_judged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tuple(raising(rule, ZeroDivisionError("x"), LAYERS[0]) if rule.id == "symmetry" else rule
                           for rule in RULES))  # fmt: skip

    report = verify(folder)

    (bug,) = (finding for finding in report.findings if finding.rule == "internal")
    assert bug.tensor == f"{LAYERS[0]}.qweight"
    assert [finding.tensor for finding in without_internal(report)] == [f"{LAYERS[2]}.qzeros"]
    assert report.verdict == "findings"


def test_a_rule_that_raises_only_over_several_layers_is_told_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(own: Rule, subject: VerifiedCheckpoint) -> Iterator[Finding]:
        if len(subject.layers) > 1:
            raise ValueError("in company")
        yield from ()

    use(monkeypatch, (Rule(MADE_UP, check, each=True),))

    report = verify(folder)

    assert [finding.rule for finding in report.findings] == ["internal"]
    assert "ValueError: in company" in report.findings[0].message


def test_findings_before_an_exception_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(own: Rule, subject: VerifiedCheckpoint) -> Iterator[Finding]:
        yield own.finding("a", None, "a: found")
        raise ValueError("then not")

    for each in (False, True):
        use(monkeypatch, (Rule(MADE_UP, check, each=each),))
        report = verify(folder)
        assert "a: found" in {finding.message for finding in report.findings} or each
        assert any(finding.rule == "internal" for finding in report.findings)


@pytest.mark.parametrize("at", range(len(LAYERS)))
def test_a_tensor_that_cannot_be_measured_is_named_and_judged_no_more(
    at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure: Any = vars(run_rules)["measure"]

    def failing(part: Any) -> Any:
        if f"{LAYERS[at]}.scales" in part.readable_names:
            raise RuntimeError("measured wrong")
        return measure(part)

    monkeypatch.setattr(run_rules, "measure", failing)
    report = verify(folder)

    (bug,) = (finding for finding in report.findings if finding.rule == "internal")
    assert bug.tensor == f"{LAYERS[at]}.scales"
    assert "RuntimeError: measured wrong" in bug.message
    assert [finding.rule for finding in without_internal(report)] == (["symmetry"] if at < 2 else [])


@pytest.mark.parametrize("rule", INSPECTED, ids=lambda rule: rule.id)
def test_inspect_goes_on_too(rule: Rule, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = tuple(raising(each, TypeError("t")) if each is rule else each for each in INSPECTED)
    monkeypatch.setattr(verification, "INSPECTED", rules)

    report = inspect(folder)

    assert report.verdict == "internal"
    assert len(report.layers) == len(LAYERS)


@pytest.mark.parametrize(
    "name",
    [
        "architecture",
        "missing_by_design",
        "contradicted_settings",
        "loader_notes",
        "zero_point_readings",
        "subnormals",
    ],
)
def test_a_note_may_raise(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(subject: VerifiedCheckpoint) -> Iterator[str]:
        yield from ()
        raise LookupError(name)

    for constant in ("NOTES", "NOTES_OF_LAYERS"):
        notes = getattr(run_rules, constant)
        monkeypatch.setattr(
            run_rules, constant, tuple(raises if each.__name__ == name else each for each in notes)
        )

    report = verify(folder)

    assert any(f"notes: internal error, LookupError: {name}" in each.message for each in report.findings)
    assert [finding.rule for finding in without_internal(report)] == ["symmetry"]


def test_the_report_may_fail_to_describe_a_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info_of: Any = vars(verification)["info_of"]

    def failing(weights: Any, layer: Any) -> Any:
        if layer.prefix == LAYERS[1]:
            raise AttributeError("none")
        return info_of(weights, layer)

    monkeypatch.setattr(verification, "info_of", failing)

    report = inspect(folder)

    assert [layer.prefix for layer in report.layers] == [LAYERS[0], LAYERS[2]]
    assert [finding.tensor for finding in report.findings] == [f"{LAYERS[1]}.qweight"]
    assert report.verdict == "internal"


@pytest.mark.parametrize("call", [inspect, verify])
def test_an_exception_on_opening_is_told_in_a_sentence(
    call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Any, **options: Any) -> VerifiedCheckpoint:
        raise RecursionError("too deep")

    monkeypatch.setattr(VerifiedCheckpoint, "open", failing)

    report = call(folder)

    (bug,) = report.findings
    assert (report.verdict, report.exit_code, bug.rule) == ("internal", 3, "internal")
    assert "RecursionError: too deep" in bug.message


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("none left")])
def test_an_interrupt_and_a_lack_of_memory_are_no_bugs(
    error: BaseException, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, (raising(RULES[0], error),))  # type: ignore[arg-type]

    with pytest.raises(type(error)):
        verify(folder)


def test_a_file_that_fails_meanwhile_is_unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, (raising(RULES[0], StorageError("a", "closed", "was closed")),))

    assert verify(folder).verdict == "unreadable"


def test_the_traceback_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    use(monkeypatch, (raising(RULES[0], KeyError("G")),))

    with caplog.at_level("INFO", "qload"):
        verify(folder)

    assert any(record.exc_info for record in caplog.records)


def test_a_comparison_may_raise_for_one_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qload.verify import against

    same: Any = vars(against)["has_equal_bytes"]

    def failing(pair: Any) -> Any:
        if pair.layer.prefix == LAYERS[1]:
            raise IndexError("beyond")
        return same(pair)

    monkeypatch.setattr(against, "has_equal_bytes", failing)

    report = verify(folder, against=folder)

    assert [(each.rule, each.tensor) for each in report.findings] == [
        ("symmetry", f"{LAYERS[2]}.qzeros"), ("internal", LAYERS[1]),
    ]  # fmt: skip


def test_the_check_of_ranks_may_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise IndexError("beyond")
        yield

    monkeypatch.setattr(sys.modules["qload.verify.verification"], "check_ranks", failing)

    assert [each.message for each in verify(folder, tp=2).findings if each.rule == "internal"] == [
        "tensor-parallel: internal error, IndexError: beyond"
    ]


def test_an_index_of_zeros_says_no_groups_where_act_order_is_denied(tmp_path: Path) -> None:
    """With `g_idx` of zeros and desc_act false, the groups are in order: no finding and no unread tensor."""
    tensors = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        tensors.update(gptq(f"model.layers.0.self_attn.{name}"))
        tensors[f"model.layers.0.self_attn.{name}.g_idx"] = torch.zeros(16, dtype=torch.int32)
    folder = model(tmp_path, tensors, quantization_config=GPTQ)

    for report in (inspect(folder), verify(folder), verify(folder, against=folder)):
        assert (report.verdict, report.findings) == ("ok", ())
