"""`nox -s demo`: expected findings, printed output, and failure without an expected finding."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from qload.verify import verify
from tests import demo
from tests.paths import FIXTURES
from tests.verify import damage
from tests.verify.damage import Case

GPTQ = FIXTURES / "gptq" / "model_g32_desc_act"
AWQ = FIXTURES / "awq" / "model_gemm_g64"
ZERO_POINTS, ROLLED = demo.DAMAGES[:2]


def shown(folder: Path, *checkpoints: Path, damages: tuple[demo.Damage, ...]) -> tuple[list[str], str]:
    """Return the missing findings and the text of a demonstration."""
    out = Console(file=io.StringIO(), width=400, color_system=None)
    broken = demo.demonstrate(out, folder, checkpoints, damages)
    assert isinstance(out.file, io.StringIO)
    return broken, out.file.getvalue()


@pytest.mark.parametrize("checkpoint", [AWQ, GPTQ], ids=["awq", "gptq"])
def test_every_damage_is_found_and_its_cause_is_named(checkpoint: Path, tmp_path: Path) -> None:
    broken, text = shown(tmp_path, checkpoint, damages=demo.DAMAGES)

    assert broken == []
    assert "4 with --against" in text
    assert all(each.cause.format(reference=checkpoint) in text for each in demo.DAMAGES)


def test_the_real_checkpoints_are_both_shown() -> None:
    assert {path.resolve() for path in demo.models()} == {AWQ, GPTQ}


def test_it_says_so_where_only_another_checkpoint_can_tell(tmp_path: Path) -> None:
    sentence = "only --against can see this damage"

    assert sentence in shown(tmp_path, AWQ, damages=(ROLLED,))[1]
    assert sentence not in shown(tmp_path, GPTQ, damages=(ZERO_POINTS,))[1]


def test_the_reader_sees_what_changed(tmp_path: Path) -> None:
    text = shown(tmp_path, GPTQ, damages=(ZERO_POINTS,))[1]

    assert "down_proj.qzeros: 384 of 384 differ; at (0, 0) 0x77777777 becomes 0x88888888" in text


def test_the_damaged_copies_stay(tmp_path: Path) -> None:
    shown(tmp_path / "deep" / "er", GPTQ, damages=(ZERO_POINTS,))

    (finding,) = verify(tmp_path / "deep" / "er" / "gptq-zero-points").findings
    assert finding.rule == "symmetry"


def test_a_damage_that_does_nothing_breaks_both_promises(tmp_path: Path) -> None:
    nothing = replace(ZERO_POINTS, do=lambda case: None)

    broken, text = shown(tmp_path, GPTQ, damages=(nothing,))

    assert len(broken) == 2
    assert "symmetry" in broken[0]
    assert "read with zero points one lower" in broken[1]
    assert "0 alone, 0 with --against" in text
    assert "only --against can see" not in text


def test_another_cause_than_the_promised_one_breaks_the_promise(tmp_path: Path) -> None:
    other = replace(ZERO_POINTS, do=damage.scales_rolled, alone={})

    broken, _ = shown(tmp_path, GPTQ, damages=(other,))

    assert len(broken) == 1


def test_a_finding_in_a_sound_checkpoint_breaks_the_promise(tmp_path: Path) -> None:
    case = damage.read_case(GPTQ)
    damage.scale_nan(case)
    unsound = damage.write_case(case, tmp_path / "unsound")

    broken, _ = shown(tmp_path, unsound, damages=())

    assert broken == [f"{unsound} is sound, and qload verify says findings: scale-value"]


@pytest.mark.parametrize(
    ("do", "code"), [(ZERO_POINTS.do, 0), (lambda case: None, 1)], ids=["kept", "broken"]
)
def test_a_broken_promise_is_its_exit_code(
    do: Callable[[Case], None], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "models", lambda: [GPTQ])
    monkeypatch.setattr(demo, "DAMAGES", (replace(ZERO_POINTS, do=do),))

    result = CliRunner().invoke(demo.main, [str(tmp_path)])

    assert result.exit_code == code
    assert ("broken promise" in result.stderr) == bool(code)
    assert "broken promise" not in result.stdout
