"""qload vectors: the frozen test vectors, as files for programs in any language."""

from collections import Counter
from pathlib import Path

import click

from qload.cli.options import OutputFolder, verbose

EPILOG = """\b
Examples:
  qload vectors export ./vectors

Exit codes: 0 they were written, 2 the command is wrong, 3 a bug of qload."""


@click.group(epilog=EPILOG)
def vectors() -> None:
    """Write the frozen test vectors into a folder."""


@vectors.command()
@click.argument("folder", type=OutputFolder())
@verbose
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
