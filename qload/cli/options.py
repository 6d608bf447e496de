"""Options and arguments of several verbs."""

import logging
import os
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from qload.cli.checkpoint_paths import parse_hub_id

if TYPE_CHECKING:
    import torch

F = TypeVar("F", bound=Callable[..., Any])
VERBOSE_KEY = f"{__name__}.verbose"  # in the meta of click's contexts
STDOUT = Path("-")
GIGABYTE = 1_000_000_000
MAX_FILE_BYTES = 2**63 - 1  # file offsets are signed 64-bit integers
MAX_DIGITS = 9  # of a number on the command line


class NonemptyPath(click.Path):
    """Path argument that refuses the empty string, the value of an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a path; an empty string is a usage error."""
        if value == "":
            self.fail("is empty", param, ctx)
        return super().convert(value, param, ctx)


class CheckpointPath(NonemptyPath):
    """Path of a checkpoint, or a model id of the hub. A missing path is a verdict, not a usage error."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a `HubId` or a path; an empty string is a usage error."""
        return (parse_hub_id(value) if isinstance(value, str) else None) or super().convert(value, param, ctx)


class OutputFolder(NonemptyPath):
    """Path of a new folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)


class OutputFile(click.Path):
    """Path of an output file, checked before the work begins.

    `allow_dash`: accept `-` for standard output. `needs_jinja`: require Jinja, for a page of HTML.
    """

    def __init__(self, *, allow_dash: bool = False, needs_jinja: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)
        self.needs_jinja = needs_jinja

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert to a path; a missing or read-only folder, or a missing Jinja, is a usage error."""
        path = Path(str(super().convert(value, param, ctx)))
        is_stdout = self.allow_dash and path == STDOUT
        if not is_stdout and not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} is not a writable directory", param, ctx)
        if self.needs_jinja and util.find_spec("jinja2") is None:
            self.fail('pages need Jinja: pip install "qload-weights[pictures]"', param, ctx)
        return path


def parse_counts(
    noun: str,
) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...] | None]:
    """Create a callback that parses `4` or `1,2,4` as positive numbers of `noun`."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        numbers = _parse_integers(value.split(","))
        if numbers is None:
            message = f"{value!r} is not a number of {noun}, or a list such as 1,2,4"
            raise click.BadParameter(message, ctx, param)
        if min(numbers) < 1:
            raise click.BadParameter(f"{min(numbers)} is less than 1", ctx, param)
        return numbers

    return parse


def parse_token_ids(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse `1,2,3` as token ids; anything else is a usage error."""
    if value is None:
        return None
    ids = _parse_integers([part.strip() for part in value.split(",")])
    if ids is None:
        raise click.BadParameter(f"{value!r} is not a list of token ids such as 1,2,3", ctx, param)
    return ids


def _parse_integers(parts: list[str]) -> tuple[int, ...] | None:
    """Parse non-negative decimal numbers; None if one of the parts is anything else."""
    valid = all(part.isdecimal() and part.isascii() and len(part) <= MAX_DIGITS for part in parts)
    return tuple(map(int, parts)) if valid else None


def parse_device(device: str) -> "torch.device":
    """Parse the CPU or a CUDA device of this machine; ArgumentError for any other device."""
    from qload.errors import ArgumentError
    from qload.weights.weights import device_of

    parsed = device_of(device)
    if parsed.type not in ("cpu", "cuda"):
        raise ArgumentError("device", "cpu or a CUDA device", str(parsed))
    return parsed


def _parse_gigabytes(ctx: click.Context, param: click.Parameter, value: float) -> int:
    """Convert gigabytes to bytes, at least 1."""
    size = value * GIGABYTE
    if not size <= MAX_FILE_BYTES:
        limit = MAX_FILE_BYTES // GIGABYTE
        raise click.BadParameter(f"{value} GB is too large: a file has at most {limit} GB", ctx, param)
    return max(1, int(size))


class _StderrHandler(logging.Handler):
    """Log handler that prints through click: sys.stderr may change while a progress bar is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        from qload.cli.text import escape

        click.echo(escape(self.format(record), keep="\n\t"), err=True)


def is_verbose(ctx: click.Context) -> bool:
    """Return True if -v is given, before or after the name of the verb."""
    return bool(ctx.meta.get(VERBOSE_KEY))


def _start_logging(ctx: click.Context, _: click.Parameter, level: int) -> None:
    log = logging.getLogger("qload")
    if level:
        ctx.meta[VERBOSE_KEY] = True
    if not level or ctx.resilient_parsing or any(isinstance(h, _StderrHandler) for h in log.handlers):
        return
    handler, previous_level = _StderrHandler(), log.level
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if level == 1 else logging.DEBUG)

    @ctx.call_on_close
    def _stop_logging() -> None:
        log.removeHandler(handler)
        log.setLevel(previous_level)


paths_argument = click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="PATH...")


def world_sizes_option(help: str, **settings: Any) -> Callable[[F], F]:
    """Add --tp with a list of world sizes."""
    return click.option(
        "--tp",
        "--tensor-parallel-size",
        "tp",
        callback=parse_counts("ranks"),
        metavar="N[,N...]",
        help=help,
        **settings,
    )


def image_option(help: str) -> Callable[[F], F]:
    """Add --image FILE, a repeatable option."""
    return click.option(
        "--image",
        "images",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        multiple=True,
        metavar="FILE",
        help=f"{help} Needs qload-weights[images]. May be repeated.",
    )


output_folder_option = click.option(
    "-o", "folder", type=OutputFolder(), required=True, metavar="DIR", help="Output folder: new, or empty."
)
# In gigabytes on the command line, in bytes as a parameter.
shard_size_option = click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5,
    show_default=True,
    metavar="GB",
    callback=_parse_gigabytes,
    help="Maximum size of a file, in gigabytes.",
)


def html_option(content: str) -> Callable[[F], F]:
    """Add --html FILE, a page of the report."""
    return click.option(
        "--html",
        type=OutputFile(needs_jinja=True),
        metavar="FILE",
        help=f"Also write {content} to FILE, as a page with tables to sort and filter.",
    )


all_option = click.option(
    "--all", "every", is_flag=True, help="Print a line for each layer; by default equal layers share one."
)
experts_parallel_option = click.option(
    "--ep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Divide whole experts among N groups of ranks. Default: all ranks cut each expert.",
)
nonfinite_option = click.option(
    "--nonfinite",
    type=click.Choice(["error", "allow"]),
    default="error",
    show_default=True,
    help="Refuse a layer with a NaN or infinite scale, or load it as it is stored.",
)
# None is the default, which depends on standard output.
json_option = click.option(
    "--json/--table",
    "as_json",
    default=None,
    help="Print JSON or tables. Default: tables on a terminal, JSON elsewhere.",
)
# Of the group and of each verb.
verbose_option = click.option(
    "-v",
    "--verbose",
    count=True,
    expose_value=False,
    callback=_start_logging,
    help="Log each step on standard error; -vv logs more.",
)


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a verb with a report, and pass the context to the verb."""
    return json_option(verbose_option(click.pass_context(command)))
