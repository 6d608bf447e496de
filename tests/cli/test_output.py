"""Errors of a command in this process, output of other ranks, consoles, and progress on a terminal."""

import io
import json
import sys
from pathlib import Path

import click
import pytest
from rich.text import Text

from qload.cli.output import (
    UnsupportedCommandError,
    exit_on_error,
    exit_quietly_unless_first,
    torchrun_group,
    write_file,
)
from qload.cli.progress import progress_bar
from qload.cli.tables import stdout
from qload.errors import (
    ArgumentError,
    CutError,
    DivideError,
    LostRankError,
    NotEnoughMemoryError,
    StorageError,
    UnreadTensorsError,
    UnsupportedFormatError,
)
from tests.cli.test_several import run
from tests.paths import FIXTURES

MODEL = FIXTURES / "gptq" / "model_g32_desc_act"
FULL = "No space left on device"
BUG = "internal error, ValueError: wrong twice"
REPORT_IT = "this is a bug of qload: please report it; -v shows the traceback"
# An error inside a command, its exit code, and its text on standard error and as JSON.
ENDS: list[tuple[Exception, int, str, str | None]] = [
    (OSError(28, FULL), 2, f"standard output: {FULL}", None),
    (OSError(28, FULL, "out/report"), 2, f"out/report: {FULL}", f"out/report: {FULL}"),
    (OSError("closed"), 2, "standard output: closed", None),
    (UnsupportedCommandError("no model"), 2, "no model", "no model"),
    (
        ArgumentError("tp", "1 or more", "0"),
        2,
        "tp, expected 1 or more, got 0",
        "tp\n  expected 1 or more\n  got      0",
    ),
    (
        CutError("up", "K", 64, 40, 32, "groups", 3, (1, 2)),
        2,
        "up: cannot cut K = 64 at 40 for 3 ranks, cuts must be multiples of 32 groups, nearest 32 or 64, "
        "lawful world sizes 1, 2",
        "up: cannot cut K = 64 at 40 for 3 ranks\n  cuts must be multiples of 32   groups\n"
        "  nearest  32 or 64\n  lawful   world sizes 1, 2",
    ),
    (
        DivideError("up", "K", 5, "2 ranks"),
        2,
        "up: K = 5 does not divide into 2 ranks",
        "up: K = 5 does not divide into 2 ranks",
    ),
    (
        NotEnoughMemoryError("cpu", 5, 3),
        2,
        "cpu: too little memory, needed 5 bytes, free 3 bytes",
        "cpu: too little memory\n  needed 5 bytes\n  free   3 bytes",
    ),
    (
        StorageError("a.safetensors", "file-length", "is cut", remedy="fetch it\n  again"),
        1,
        "a.safetensors: is cut; remedy: fetch it again",
        "a.safetensors: is cut\n  remedy   fetch it\n  again",
    ),
    (
        UnsupportedFormatError("up: gguf", "no reader"),
        4,
        "up: gguf: not read by this qload, reason no reader",
        "up: gguf: not read by this qload\n  reason   no reader",
    ),
    (ValueError("wrong\n twice"), 3, f"{BUG}; {REPORT_IT}", BUG),
]


@pytest.mark.parametrize(("error", "code", "text", "as_json"), ENDS)
def test_an_error_ends_a_command_with_its_code_and_one_line(
    error: Exception, code: int, text: str, as_json: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for json_too in (False, True):
        with pytest.raises(click.exceptions.Exit) as raised, exit_on_error(json_too):
            raise error
        assert raised.value.exit_code == code
        shown[json_too], err = capsys.readouterr()
        assert err == f"Error: {text}\n"

    assert shown[False] == ""
    if as_json is None:
        assert shown[True] == ""
    else:
        found = json.loads(shown[True])
        assert [*found.items()] == [
            ("schema", 2), ("verdict", "error"), ("error", as_json), ("exit_code", code)
        ]  # fmt: skip
        assert shown[True].count("\n") == 1


def test_unread_tensors_are_no_unreadable_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit) as raised, exit_on_error(False):
        raise UnreadTensorsError({"up.weight": "no format"}, 8)

    assert raised.value.exit_code == 4
    assert "up.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"), [(KeyboardInterrupt, 130, "\n"), (BrokenPipeError, 141, "")]
)
def test_a_signal_ends_a_command_without_a_message(
    error: type[BaseException], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit) as raised, exit_on_error(True):
        raise error

    assert raised.value.exit_code == code
    assert capsys.readouterr() == ("", text)


def test_the_traceback_of_a_bug_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit), exit_on_error(False, lambda: True):
        raise ValueError("wrong" * 100)

    traceback, _, line = capsys.readouterr().err.removesuffix("\n").rpartition("\n")
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert f"ValueError: {'wrong' * 100}\n" in traceback
    assert line == f"Error: internal error, ValueError: {'wrong' * 80}; {REPORT_IT}"


def test_an_error_on_a_closed_output_is_an_error_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.exceptions.Exit) as raised, exit_on_error(False):
        pytest.fail("the command ran")

    assert raised.value.exit_code == 2
    assert capsys.readouterr().err == "Error: standard output: closed\n"


def test_what_is_left_in_the_buffer_of_a_closed_pipe_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        out.write("half a report")
        with pytest.raises(click.exceptions.Exit), exit_on_error(False):
            raise BrokenPipeError

    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_the_error_of_all_ranks_is_printed_by_the_first(rank: int) -> None:
    with (
        pytest.raises(click.exceptions.Exit if rank else ArgumentError) as raised,
        exit_quietly_unless_first(lambda: rank),
    ):
        raise ArgumentError("tp", "1 or more", "0")
    assert not rank or raised.value.exit_code == 0

    with pytest.raises(LostRankError), exit_quietly_unless_first(lambda: rank):
        raise LostRankError(1, 2, "it ended")


@pytest.mark.parametrize("verb", ["inspect", "plan", "explain"])
def test_other_ranks_of_a_short_verb_print_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = {}
    for rank in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("RANK", rank)
        result = run(verb, MODEL)
        printed[rank] = bool(result.stdout), bool(result.stderr)

    assert (result.exit_code, printed) == (0, {"0": (True, True), "1": (False, False)})


def test_a_verb_outside_of_torchrun_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with torchrun_group() as group:
        assert group is None


def test_a_single_rank_of_torchrun_is_the_first_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "run"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with torchrun_group() as group:
        assert group is not None
        assert (group.rank(), group.size()) == (0, 1)
    with pytest.raises(ArgumentError), torchrun_group():
        raise ArgumentError("tp", "1 or more", "0")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "page", "層")
    with pytest.raises(OSError, match="Is a directory") as raised:
        write_file(tmp_path, "text")

    assert (tmp_path / "page").read_bytes() == "層".encode()
    assert raised.value.filename == str(tmp_path)


def test_a_name_outside_of_the_encoding_of_the_output_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for encoding, shown in (("latin-1", b"\\u5c64 \xe9\n"), ("utf-8", "層 é\n".encode())):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
        console = stdout()
        console.print(Text("層 é"))
        console.file.flush()
        assert (written.getvalue(), console.width) == (shown, 120)


class Terminal(io.StringIO):
    """Terminal with a record of its lines."""

    def isatty(self) -> bool:
        return True


class ClosedPipe(io.StringIO):
    """A pipe without a reader."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_closed_pipe_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedPipe())

    with pytest.raises(BrokenPipeError):
        stdout().print(Text("a report"))


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_stage_and_bytes(no_color: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(visible=True) as update:
        assert update is not None
        for stage, done in (("headers", 2), ("headers", 4), ("values [red]", 1)):
            update(stage, done * 10**6, 8 * 10**6)

    shown = terminal.getvalue()
    assert ("\x1b[" in shown) != bool(no_color)
    if no_color:
        assert shown.splitlines()[0] == "headers: 2 of 8 MB"
    else:
        assert "values [red]" in shown  # no markup of rich
        assert "1.0/8.0 MB" in shown


def test_a_hidden_bar_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar(visible=False) as update:
        assert update is None

    assert terminal.getvalue() == ""
