"""The group of verbs, and what holds for every one of them: logging, interrupts, a reader that leaves."""

import os
import sys
from typing import Any

import click

from qload.cli.doctor import doctor
from qload.cli.formats import formats
from qload.cli.inspect import inspect
from qload.cli.options import verbose
from qload.cli.verify import verify

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
READER_LEFT = 141  # 128 + SIGPIPE: neither 0 nor 1, because no verdict was delivered

EPILOG = """\b
Examples:
  qload inspect ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 4
  qload verify ./Llama-3-8B-GPTQ --json > report.json

Exit codes: 0 nothing was found, 1 there are findings or it cannot be read, 2 the command is wrong.

Standard output is data: tables on a terminal, JSON in a pipe or a file. Progress and logging go to standard
error. With NO_COLOR set, no escape sequence is printed."""


class Verbs(click.Group):
    """A group whose exit codes mean what docs/cli.md says, also when it is interrupted."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; an interrupt and a reader that leaves have exit codes of their own."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(err=True)  # the terminal has just printed ^C
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # what is still buffered goes nowhere
            ctx.exit(READER_LEFT)


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from importlib import metadata

    try:
        version = metadata.version("qload-weights")
    except metadata.PackageNotFoundError:
        version = "(a source tree that is not installed)"
    click.echo(f"qload {version}")
    ctx.exit()


@click.group(
    cls=Verbs,
    commands=[inspect, verify, formats, doctor],
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and leave.",
)
@verbose
def main() -> None:
    """Say what a quantized checkpoint holds, and find what is wrong with it.

    PATH is a directory or one .safetensors file. Nothing is downloaded and no file is executed.
    """
