"""Progress output of a verb."""

import sys

import pytest

from qload.cli.progress import (
    LINE_INTERVAL_S,
    format_progress,
    prefix_stages,
    print_lines,
    progress_bar,
)


def test_a_line_says_bytes_rate_and_the_time_that_is_left() -> None:
    assert format_progress(512 * 10**6, 4096 * 10**6, 2.0) == "512 of 4096 MB, 256 MB/s, 14 s left"


def test_what_is_not_known_yet_is_not_said() -> None:
    assert format_progress(0, 10**6, 5.0) == "0 of 1 MB"
    assert format_progress(10**6, 10**6, 0.0) == "1 of 1 MB"


def test_nobody_looks_at_a_standard_error_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)

    with progress_bar(visible=True) as update:
        assert update is None


def test_each_stage_has_its_own_rate_and_lines_are_as_few_as_patience_allows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 1.0, LINE_INTERVAL_S + 1, LINE_INTERVAL_S + 2, 2 * LINE_INTERVAL_S + 4])
    update = print_lines(lambda: next(times))

    for stage, done in (("headers", 0), ("headers", 1), ("headers", 11), ("values", 0), ("values", 24)):
        update(stage, done * 10**6, 36 * 10**6)

    assert capsys.readouterr().err.splitlines() == [
        "headers: 0 of 36 MB",
        "headers: 11 of 36 MB, 1 MB/s, 25 s left",
        "values: 0 of 36 MB",
        "values: 24 of 36 MB, 2 MB/s, 6 s left",
    ]


def test_the_stage_of_one_of_several_checkpoints_has_its_name() -> None:
    steps: list[tuple[str, int, int]] = []
    update = prefix_stages(lambda *step: steps.append(step), "model")

    assert update is not None
    update("headers", 1, 3)
    assert steps == [("model: headers", 1, 3)]
    assert prefix_stages(None, "model") is None
