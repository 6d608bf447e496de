"""The verbs selftest, scoreboard, make-checkpoint and vectors: the test harness on the command line."""

import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from qload.cli.options import NonemptyPath, OutputFolder, json_option, output_folder_option, verbose_option
from qload.cli.output import print_data
from qload.cli.text import escape, format_count
from qload.errors.reporting import SCHEMA

SELFTEST_EPILOG = """\b
Examples:
  qload selftest mykernel.adapter:MyKernel
  qload selftest --tests "pytest tests/kernels" --pack mykernel:pack --format gptq
  qload selftest --suites

Exit codes: 0 every fault is caught, 1 some faults pass, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=SELFTEST_EPILOG)
@click.argument("adapter", required=False, metavar="[MODULE:CLASS]")
@click.option(
    "--tests",
    metavar="COMMAND",
    help="Use your own tests instead of qload's checks, such as 'pytest tests/kernels'.",
)
@click.option("--pack", metavar="MODULE:FUNCTION", help="With --tests: function that packs a weight.")
@click.option(
    "--gemm",
    metavar="MODULE:FUNCTION",
    help="With --tests: function that multiplies x (M, K) by a packed weight.",
)
@click.option("--format", "format_name", metavar="FORMAT", help="With --pack: format of its tensors.")
@click.option(
    "--suites", is_flag=True, help="Use the suites of qload.conformance with their reference kernels."
)
@json_option
@verbose_option
def selftest(
    adapter: str | None,
    tests: str | None,
    pack: str | None,
    gemm: str | None,
    format_name: str | None,
    suites: bool,
    as_json: bool | None,
) -> None:
    """Test the checks of a kernel with known faults.

    Each fault is planted in the kernel in turn, and the command prints the checks that notice it.

    MODULE:CLASS has the attribute `format` and the methods `pack(weight)` and `gemm(x, buffers)`. The command
    imports and runs this code.
    """
    if (adapter is not None) + (tests is not None) + suites != 1:
        raise click.UsageError("give one of MODULE:CLASS, --tests and --suites")
    sys.path.insert(0, os.getcwd())
    if suites:
        rows = _judge_suites()
    elif tests is not None:
        rows = _judge_user_tests(tests, pack, gemm, format_name)
    else:
        rows = _judge_adapter(str(adapter))
    raise SystemExit(report_faults(rows, as_json))


def report_faults(rows: list[dict[str, Any]], as_json: bool | None) -> int:
    """Print one row for each fault as a table or as JSON, with a summary; 1 if one is let through, else 0.

    A row has `fault`, `words`, `end` and further columns by name. `as_json`: None for JSON unless standard
    output is a terminal.
    """
    passed = [row["fault"] for row in rows if row["end"] == "let through"]
    report = {"schema": SCHEMA, "faults": rows, "let_through": passed}
    count = f"{len(rows) - len(passed)} of {len(rows)} faults are caught"
    print_data(report, as_json, _print_faults, [count, *(f"let through  {fault}" for fault in passed)])
    return 1 if passed else 0


def _judge_adapter(path: str) -> list[dict[str, Any]]:
    from qload.testing.selftest.matrix import adapter_of, kill_matrix

    module, _, name = path.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"{path}: {error}") from error
    return [result.row() for result in kill_matrix(adapter_of(adapter))]


def _judge_suites() -> list[dict[str, Any]]:
    from qload.conformance.seeded_faults import try_faults

    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        return [result.row() for result in try_faults(Path(folder))]


def _judge_user_tests(
    tests: str, pack: str | None, gemm: str | None, format_name: str | None
) -> list[dict[str, Any]]:
    from qload.testing.selftest import adopted_matrix

    return [result.row() for result in adopted_matrix(tests, pack=pack, gemm=gemm, format=format_name)]


def _print_faults(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.tables import NamedRow, NameTable, stdout

    rows = report["faults"]
    columns = [name for name in rows[0] if name not in ("fault", "words")] if rows else []
    named_rows = [NamedRow(row["fault"], [Text(str(row[name] or "")) for name in columns]) for row in rows]
    stdout().print(NameTable("fault", columns, named_rows))


SCOREBOARD_EPILOG = """\b
Examples:
  pytest tests/kernels --qload-report=report.json
  qload scoreboard report.json
  qload scoreboard cpu.json gpu.json --markdown > scoreboard.md
  qload scoreboard report.json --json | jq -r '.rows[] | [.subject, .result] | @tsv'

Exit codes: 0 no subject fails, 1 some subjects fail, or a report cannot be read, 2 the command is wrong, 3 a
bug of qload."""


@click.command(epilog=SCOREBOARD_EPILOG)
@click.argument(
    "reports",
    type=NonemptyPath(exists=True, dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
    metavar="REPORT...",
)
@json_option
@click.option("--markdown", is_flag=True, help="Print a page in Markdown, with each failure.")
@verbose_option
def scoreboard(reports: tuple[Path, ...], as_json: bool | None, markdown: bool) -> None:
    """Show the results of suites of qload.conformance, with a row for each subject.

    REPORT is a file that `pytest --qload-report=FILE` wrote. A row has the version of the subject, the cases
    that ran, the skipped ones with reasons, the largest error in units of the bound of rounding, failed tests
    by their diagnosis, and the command that repeats them.
    """
    from qload.conformance.scoreboard import make_scoreboard, read_report

    board = make_scoreboard([read_report(path) for path in reports])
    if markdown:
        click.echo(board.as_markdown(), nl=False)
    else:
        report = {"schema": SCHEMA, **board.to_json()}
        subjects = format_count(len(board.rows), "subject")
        lines = [f"{len(board.failing)} of {subjects} fail"]
        lines += [f"fails  {escape(row.subject)}: {row.result}" for row in board.failing]
        print_data(report, as_json, _print_scoreboard, lines)
    raise SystemExit(1 if board.failing else 0)


def _print_scoreboard(report: dict[str, Any]) -> None:
    from rich.text import Text

    from qload.cli.tables import NamedRow, NameTable, stdout

    out = stdout()
    columns = ["version", "suite", "cases", "error / bound", "result"]
    rows = []
    for row in report["rows"]:
        error = "" if row["error"] is None else f"{row['error']:.3g}"
        owner = f"{row['package']} {row['version']}".strip()
        cells = (owner, row["suite"], str(row["cases"]), error, row["result"])
        rows.append(NamedRow(escape(row["subject"]), [Text(escape(cell)) for cell in cells]))
    out.print(NameTable("subject", columns, rows))
    for row in report["rows"]:
        for failure in row["failures"]:
            out.print(Text(f"\n{escape(row['subject'])}  {escape(failure['fault'])}", "red"))
            for line in (failure["case"], *failure["lines"], failure["replay"]):
                out.print(Text(f"  {escape(line)}"))


MAKE_EPILOG = """\b
Examples:
  qload make-checkpoint gptq -o ./tiny-llama-gptq
  qload make-checkpoint compressed-tensors -o ./tiny-moe --model mixtral
  qload make-checkpoint awq -o ./tiny --config '{"num_hidden_layers": 1}'

Exit codes: 0 the checkpoint was written, 2 the command is wrong, 3 a bug of qload."""


def _parse_config(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, object]:
    """Parse a JSON object; anything else is a usage error."""
    try:
        entries = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is not JSON: {error}", ctx, param) from error
    if not isinstance(entries, dict):
        raise click.BadParameter("is not a JSON object", ctx, param)
    return entries


@click.command("make-checkpoint", epilog=MAKE_EPILOG)
@click.argument("format", metavar="FORMAT")
@output_folder_option
@click.option(
    "--model", default="llama", show_default=True, metavar="TYPE", help="A model_type supported by qload run."
)
@click.option(
    "--config",
    callback=_parse_config,
    metavar="JSON",
    default="{}",
    help="Entries of config.json that override the defaults.",
)
@verbose_option
def make_checkpoint(format: str, folder: Path, model: str, config: dict[str, object]) -> None:
    """Write a tiny checkpoint of FORMAT to DIR.

    It has all tensors of the config, in a few hundred kilobytes, and each value encodes its position. The
    same command writes the same bytes. The error for an unknown name lists the known names.
    """
    from qload.testing import make_checkpoint as run

    tensors = run(format, folder, model=model, config=config)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    click.echo(f"{folder}: {len(tensors)} tensors, {nbytes} bytes", err=True)


VECTORS_EPILOG = """\b
Examples:
  qload vectors export ./vectors

Exit codes: 0 the vectors were written, 2 the command is wrong, 3 a bug of qload."""


@click.group(epilog=VECTORS_EPILOG)
def vectors() -> None:
    """Write the frozen test vectors to a folder."""


@vectors.command()
@click.argument("folder", type=OutputFolder())
@verbose_option
def export(folder: Path) -> None:
    """Write all vectors to FOLDER, new or empty.

    Each case is a folder with a checkpoint. manifest.json has the purpose and the meaning of each case,
    schema.json is its JSON schema, and SHA256SUMS has the sums of all files. The bytes are always the same.
    """
    from qload.testing.vectors import export

    manifest = export(folder)
    counts = Counter(case.result for case in manifest.cases)
    results = ", ".join(f"{count} {result}" for result, count in counts.items())
    click.echo(f"{folder}: vectors {manifest.version}, {results}")
