"""The command group `qload`: its verbs, logging and exit codes."""

import sys
from collections.abc import Sequence
from typing import Any

import click

from qload.cli.bench_load import bench_load
from qload.cli.capabilities import doctor, formats, layout
from qload.cli.conversion import convert, shard
from qload.cli.options import is_verbose, verbose_option
from qload.cli.output import exit_on_error
from qload.cli.plan import explain, plan
from qload.cli.run import run
from qload.cli.testing import make_checkpoint, scoreboard, selftest, vectors
from qload.cli.verify import diff, inspect, verify
from qload.errors.reporting import qload_version

EPILOG = """\b
Examples:
  qload inspect ./Llama-3-8B-GPTQ
  qload verify ./Llama-3-8B-GPTQ --tp 1,2,4
  qload verify ./Llama-3-8B-GPTQ --json > report.json
  qload verify ./models/* --sarif findings.sarif
  qload diff ./Llama-3-8B-GPTQ ./Llama-3-8B-AWQ
  qload convert ./Llama-3-8B-GPTQ --to awq -o ./Llama-3-8B-AWQ
  qload shard ./Llama-3-8B-GPTQ --tp 4 -o ./Llama-3-8B-GPTQ-of-4
  qload plan ./Llama-3-8B-GPTQ --tp 2,4,8
  qload explain ./Llama-3-8B-GPTQ --arch sm90
  qload run ./Llama-3-8B-GPTQ --prompt-ids 128000,9906 --tokens 32

Exit codes: 0 no findings, 1 findings or unreadable, 2 the command is wrong, 3 a bug of qload, 4 the format is
unsupported or some tensors are not read. For several paths it is the first of 2, 3, 1, 4, 0 that occurs.

Standard output has data: tables on a terminal, JSON in a pipe or a file, for errors too. Progress and logging
go to standard error. With NO_COLOR set, no escape sequence is printed."""


class VerbGroup(click.Group):
    """Command group with the exit codes of docs/cli.md for every error."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **settings: Any
    ) -> click.Context:
        """Parse the options of the group; help and version exit."""
        as_json = is_json_requested(args)
        with exit_on_error(as_json):
            ctx = super().make_context(info_name, args, *more, **settings)
        ctx.meta[__name__] = as_json
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        with exit_on_error(ctx.meta[__name__], lambda: is_verbose(ctx)):
            return super().invoke(ctx)


def is_json_requested(args: Sequence[str]) -> bool:
    """Return True if an error has to be printed as JSON too, even one in the options."""
    options = list(args)[: args.index("--")] if "--" in args else args
    outputs = [option for option in options if option in ("--json", "--table", "--markdown")]
    if outputs:
        return outputs[-1] == "--json"
    return bool(args) and sys.stdout is not None and not sys.stdout.isatty()


def _print_version(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if not requested or ctx.resilient_parsing:
        return
    click.echo(f"qload {qload_version() or '(a source tree that is not installed)'}")
    ctx.exit()


@click.group(
    cls=VerbGroup,
    commands=[
        inspect,
        verify,
        diff,
        convert,
        shard,
        plan,
        explain,
        run,
        formats,
        layout,
        doctor,
        bench_load,
        make_checkpoint,
        selftest,
        scoreboard,
        vectors,
    ],
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@verbose_option
def main() -> None:
    """Examine, verify, convert and run quantized checkpoints.

    PATH is a directory, a .safetensors file, an index, or a model org/model[@revision] of the hub. Only a
    model of the hub uses the network. Nothing in a file is executed.
    """
