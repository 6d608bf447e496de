"""qload formats: what can be done with each format."""

import json
import sys

import click

from qload.cli.options import as_json, verbose
from qload.cli.summary import summarize
from qload.errors.verdicts import SCHEMA

EPILOG = """\b
Examples:
  qload formats
  qload formats --json | jq '.formats.gptq'
  qload formats --markdown > docs/formats.md

Exit codes: 0 the table was printed, 2 the command is wrong, 3 a bug of qload."""


@click.command(epilog=EPILOG)
@as_json
@click.option("--markdown", is_flag=True, help="Print the table in Markdown, as docs/formats.md has it.")
@verbose
def formats(as_json: bool | None, markdown: bool) -> None:
    """Show what can be done with each format.

    Lines: load, detect, dequantize, share by column and by row, fuse, repack and restore, quantize while
    loading, verify. Where the answer is no, the line says why. The answers are derived from the declarations
    by which qload reads the formats.
    """
    from qload.capabilities import as_markdown, overview

    if markdown:
        click.echo(as_markdown(), nl=False)
        return
    table = overview()
    if as_json or (as_json is None and not sys.stdout.isatty()):
        cells = {name: {c: [cell.yes, cell.text] for c, cell in row.items()} for name, row in table.items()}
        click.echo(json.dumps({"schema": SCHEMA, "formats": cells}, indent=2))
        loaded = sum(row["load"].yes for row in table.values())
        summarize([f"{loaded} formats are read; --table shows what can be done with each"], as_json)
        return
    from rich.text import Text

    from qload.cli.console import stdout
    from qload.listing import format_label

    out = stdout()
    for name, row in table.items():
        out.print(Text(format_label(name), "bold"))
        for column, cell in row.items():
            out.print(Text(f"  {column:22}  {cell}", "" if cell.yes else "yellow"))
