"""Option `--shard-size` of verbs with a written checkpoint: maximum file size in bytes, and invalid sizes."""

from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from qload.cli.options import GIGABYTE, MAX_FILE_BYTES, shard_size_option
from tests.cli.test_several import run


@click.command()
@shard_size_option
def asked(shard_size: int) -> None:
    """Print the number of bytes."""
    click.echo(f"{type(shard_size).__name__} {shard_size}")


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ([], 5 * GIGABYTE),
        (["--shard-size", "2"], 2 * GIGABYTE),
        (["--shard-size", "0.0001"], 100_000),
        (["--shard-size", "1e-9"], 1),
        (["--shard-size", "1e-300"], 1),
        (["--shard-size", "9e9"], 9 * 10**18),
    ],
)
def test_gigabytes_are_told_in_bytes(options: Sequence[str], nbytes: int) -> None:
    assert CliRunner().invoke(asked, options).output == f"int {nbytes}\n"


@pytest.mark.parametrize(
    "verb", [["convert", "--to", "awq"], ["shard", "--tp", "2"]], ids=["convert", "shard"]
)
@pytest.mark.parametrize("size", ["0", "-1", "-inf", "nan", "inf", "1e300", "9223372036.854775808", "many"])
def test_sizes_that_no_file_has_are_a_usage_error(size: str, verb: Sequence[str], tmp_path: Path) -> None:
    result = run(*verb, "nowhere", "-o", f"{tmp_path}/out", f"--shard-size={size}")

    assert result.exit_code == 2
    assert "--shard-size" in result.stderr


def test_the_largest_size_is_said_where_one_is_larger() -> None:
    result = CliRunner().invoke(asked, ["--shard-size", "inf"])

    assert f"at most {MAX_FILE_BYTES // GIGABYTE}" in result.stderr
