"""The verbs selftest, make-checkpoint and vectors: the test harness on the command line."""

import importlib
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import click

from qload.cli.options import OutputFolder, json_option, output_folder_option, verbose_option
from qload.cli.text import print_summary
from qload.errors.reporting import SCHEMA

SELFTEST_EPILOG = """\b
Examples:
  qload selftest mykernel.adapter:MyKernel
  qload selftest --tests "pytest tests/kernels" --pack mykernel:pack --format gptq
  qload selftest --suites

Exit codes: 0 every fault is caught, 1 some are let through, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=SELFTEST_EPILOG)
@click.argument("adapter", required=False, metavar="[MODULE:CLASS]")
@click.option(
    "--tests",
    metavar="COMMAND",
    help="Your own tests, as 'pytest tests/kernels', in place of qload's checks.",
)
@click.option("--pack", metavar="MODULE:FUNCTION", help="With --tests: what packs a weight.")
@click.option("--gemm", metavar="MODULE:FUNCTION", help="With --tests: what multiplies x (M, K) by it.")
@click.option(
    "--format", "format_name", metavar="FORMAT", help="With --pack: of which format its tensors are."
)
@click.option("--suites", is_flag=True, help="The suites of qload.conformance, each with a sound subject.")
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
    """Plant known faults in a kernel, and print which checks notice.

    MODULE:CLASS has the attribute `format` and the methods `pack(weight)` and `gemm(x, buffers)`. Code that
    is named here is imported and run.
    """
    if (adapter is not None) + (tests is not None) + suites != 1:
        raise click.UsageError("name MODULE:CLASS, or your tests with --tests, or ask for --suites")
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
    through = [row["fault"] for row in rows if row["end"] == "let through"]
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(json.dumps({"schema": SCHEMA, "faults": rows, "let_through": through}, indent=2))
    else:
        _print_faults(rows)
    caught = f"{len(rows) - len(through)} of {len(rows)} faults are caught"
    print_summary([caught, *(f"let through  {fault}" for fault in through)], as_json)
    return 1 if through else 0


def _judge_adapter(place: str) -> list[dict[str, Any]]:
    from qload.testing.selftest.matrix import adapter_of, kill_matrix

    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"{place}: {error}") from error
    return [result.row() for result in kill_matrix(adapter_of(found))]


def _judge_suites() -> list[dict[str, Any]]:
    from qload.conformance.seeded_faults import try_faults

    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        return [result.row() for result in try_faults(Path(folder))]


def _judge_user_tests(
    tests: str, pack: str | None, gemm: str | None, format_name: str | None
) -> list[dict[str, Any]]:
    from qload.testing.selftest import adopted_matrix

    return [result.row() for result in adopted_matrix(tests, pack=pack, gemm=gemm, format=format_name)]


def _print_faults(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from qload.cli.tables import NamedRow, NameTable, stdout

    columns = [name for name in rows[0] if name not in ("fault", "words")] if rows else []
    listed = [NamedRow(row["fault"], [Text(str(row[name] or "")) for name in columns]) for row in rows]
    stdout().print(NameTable("fault", columns, listed))


MAKE_EPILOG = """\b
Examples:
  qload make-checkpoint gptq -o ./tiny-llama-gptq
  qload make-checkpoint compressed-tensors -o ./tiny-moe --model mixtral
  qload make-checkpoint awq -o ./tiny --config '{"num_hidden_layers": 1}'

Exit codes: 0 it was made, 2 the command is wrong, 3 a bug of qload."""


def _parse_config(ctx: click.Context, param: click.Parameter, value: str) -> dict[str, object]:
    """What a JSON object holds; anything else is a usage error."""
    try:
        found = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"is no JSON: {error}", ctx, param) from error
    if not isinstance(found, dict):
        raise click.BadParameter("is no JSON object", ctx, param)
    return found


@click.command("make-checkpoint", epilog=MAKE_EPILOG)
@click.argument("format", metavar="FORMAT")
@output_folder_option("Where to; made, or empty.")
@click.option(
    "--model", default="llama", show_default=True, metavar="TYPE", help="A model_type that qload runs."
)
@click.option(
    "--config",
    callback=_parse_config,
    metavar="JSON",
    default="{}",
    help="Entries of config.json that are different.",
)
@verbose_option
def make_checkpoint(format: str, folder: Path, model: str, config: dict[str, object]) -> None:
    """Write a tiny checkpoint of FORMAT to DIR.

    It has all tensors that the config names, in some hundred kilobytes, and every value tells where it lies.
    The same command writes the same bytes. What a name does not mean is answered with those that there are.
    """
    from qload.testing import make_checkpoint as run

    tensors = run(format, folder, model=model, config=config)
    click.echo(
        f"{folder}: {len(tensors)} tensors, {sum(each.nbytes for each in tensors.values())} bytes", err=True
    )


VECTORS_EPILOG = """\b
Examples:
  qload vectors export ./vectors

Exit codes: 0 they were written, 2 the command is wrong, 3 a bug of qload."""


@click.group(epilog=VECTORS_EPILOG)
def vectors() -> None:
    """Write the frozen test vectors into a folder."""


@vectors.command()
@click.argument("folder", type=OutputFolder())
@verbose_option
def export(folder: Path) -> None:
    """Write all vectors into FOLDER, which has to be empty or not there yet.

    Each case is a folder with a checkpoint; manifest.json says what each is for and what it means,
    schema.json is its JSON schema, and SHA256SUMS has the sums of all files. The bytes are always the same.
    """
    from qload.testing.vectors import export

    manifest = export(folder)
    counts = Counter(case.result for case in manifest.cases)
    said = ", ".join(f"{count} {result}" for result, count in counts.items())
    click.echo(f"{folder}: vectors {manifest.version}, {said}")
