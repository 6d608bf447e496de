"""qload selftest: would these checks, or these tests, notice a wrong kernel?"""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from qload.cli.options import as_json, verbose
from qload.cli.summary import summarize
from qload.errors.verdicts import SCHEMA

EPILOG = """\b
Examples:
  qload selftest mykernel.adapter:MyKernel
  qload selftest --tests "pytest tests/kernels" --pack mykernel:pack --format gptq
  qload selftest --suites

Exit codes: 0 every fault is caught, 1 some are let through, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=EPILOG)
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
@as_json
@verbose
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
        rows = _of_suites()
    elif tests is not None:
        rows = _adopted(tests, pack, gemm, format_name)
    else:
        rows = _of_adapter(str(adapter))
    through = [row["fault"] for row in rows if row["end"] == "let through"]
    if as_json or (as_json is None and not sys.stdout.isatty()):
        click.echo(json.dumps({"schema": SCHEMA, "faults": rows, "let_through": through}, indent=2))
    else:
        _print(rows)
    caught = f"{len(rows) - len(through)} of {len(rows)} faults are caught"
    summarize([caught, *(f"let through  {fault}" for fault in through)], as_json)
    raise SystemExit(1 if through else 0)


def _of_adapter(place: str) -> list[dict[str, Any]]:
    from qload.testing.selftest.matrix import adapter_of, kill_matrix

    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"{place}: {error}") from error
    return [
        {
            "subject": row.subject,
            "fault": row.fault,
            "words": row.words,
            "end": f"refused ({row.refused})" if row.refused else "caught" if row.caught else "let through",
            "named": row.named,
            **{name: "caught" if noticed else "let through" for name, noticed in row.noticed.items()},
        }
        for row in kill_matrix(adapter_of(found))
    ]


def _of_suites() -> list[dict[str, Any]]:
    from qload.conformance.planted import NAMES, planted_in_suites

    with tempfile.TemporaryDirectory(prefix="qload-selftest-") as folder:
        return [
            {
                "subject": row.case,
                "fault": row.fault,
                "words": row.words,
                "end": "let through" if row.let_through else "caught",
                **{name: str(row.suites.get(name, "")) for name in NAMES},
                **{name: "caught" if seen else "let through" for name, seen in row.tolerances.items()},
            }
            for row in planted_in_suites(Path(folder))
        ]


def _adopted(tests: str, pack: str | None, gemm: str | None, format_name: str | None) -> list[dict[str, Any]]:
    from qload.testing.selftest import adopted_matrix

    outcomes = adopted_matrix(tests, pack=pack, gemm=gemm, format=format_name)
    return [{"fault": each.fault, "words": each.words, "end": each.end} for each in outcomes]


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from qload.cli.console import stdout
    from qload.cli.tables import NamedRow, NameTable

    columns = [name for name in rows[0] if name not in ("fault", "words")] if rows else []
    listed = [NamedRow(row["fault"], [Text(str(row[name] or "")) for name in columns]) for row in rows]
    stdout().print(NameTable("fault", columns, listed))
