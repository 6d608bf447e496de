"""The group of verbs, and what holds for every one of them: logging, and how it ends."""

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
from qload.cli.testing import make_checkpoint, selftest, vectors
from qload.cli.verify import diff, inspect, verify

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

Exit codes: 0 nothing was found, 1 there are findings or it cannot be read, 2 the command is wrong, 3 a bug of
qload, 4 the format or some tensors are not read. Of several paths the worst counts: 2, 3, 1, 4, 0.

Standard output is data: tables on a terminal, JSON in a pipe or a file, also of an error. Progress and
logging go to standard error. With NO_COLOR set, no escape sequence is printed."""


class VerbGroup(click.Group):
    """A group whose exit codes mean what docs/cli.md says, however it ends."""

    def make_context(
        self, info_name: str | None, args: list[str], *more: Any, **settings: Any
    ) -> click.Context:
        """Read the options of the group, which may print help or the version."""
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
    """Whether what is printed has to be JSON, be it an error of options that were not understood."""
    options = list(args)[: args.index("--")] if "--" in args else args
    asked = [option for option in options if option in ("--json", "--table", "--markdown")]
    if asked:
        return asked[-1] == "--json"
    return bool(args) and sys.stdout is not None and not sys.stdout.isatty()


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
    help="Print the version and leave.",
)
@verbose_option
def main() -> None:
    """Say what a quantized checkpoint holds, and find what is wrong with it.

    A PATH is a directory, one .safetensors file, an index, or org/model[@revision] on the hub. The network is
    used for such a name alone, and nothing that is in a file is executed.
    """
