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
VERBOSE_KEY = f"{__name__}.verbose"  # a key of the meta that all contexts share


class CheckpointPath(click.Path):
    """A path that need not exist (that is a verdict, not a usage error) but has to be named."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or the model of the hub that a name means; an empty one is a usage error."""
        if value == "":  # an unset shell variable must not mean the current directory
            self.fail("is empty", param, ctx)
        return (parse_hub_id(value) if isinstance(value, str) else None) or super().convert(value, param, ctx)


def parse_numbers(
    what: str,
) -> Callable[[click.Context, click.Parameter, str | None], tuple[int, ...] | None]:
    """A callback: `4`, or several as `1,2,4`, as numbers of `what`; anything else is a usage error."""

    def read(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        parts = value.split(",")
        if not all(part.isdecimal() and part.isascii() and len(part) < 10 for part in parts):
            wrong = f"{value[:80]!r} is no number of {what}, and no list of them such as 1,2,4"
            raise click.BadParameter(wrong, ctx, param)
        sizes = tuple(map(int, parts))
        if min(sizes) < 1:
            raise click.BadParameter(f"{min(sizes)} is less than 1", ctx, param)
        return sizes

    return read


parse_world_sizes = parse_numbers("ranks")


def paths_argument(function: F) -> F:
    """PATH..., directories of checkpoints, or files of them."""
    return click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="PATH...")(
        function
    )


def folders_option(function: F) -> F:
    """--folders, for tools that name files."""
    return click.option(
        "--folders",
        is_flag=True,
        help="Judge the directory of each PATH, each once, and pass over those without safetensors: "
        "for tools that name the files that changed.",
    )(function)


class OutputFolder(click.Path):
    """A folder to make, which has to be named."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, file_okay=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; an empty one is a usage error."""
        if value == "":  # an unset shell variable must not mean the current directory
            self.fail("is empty", param, ctx)
        return super().convert(value, param, ctx)


def output_folder_option(help: str) -> Callable[[F], F]:
    """-o DIR, which a verb makes."""
    return click.option("-o", "folder", type=OutputFolder(), required=True, metavar="DIR", help=help)


def experts_parallel_option(function: F) -> F:
    """--ep, of ranks that have whole experts."""
    return click.option(
        "--ep",
        type=click.IntRange(min=1),
        metavar="N",
        help="Share whole experts out among N runs of ranks. Default: all ranks cut each expert.",
    )(function)


def nonfinite_option(function: F) -> F:
    """--nonfinite, about scales that are NaN or infinite."""
    return click.option(
        "--nonfinite",
        type=click.Choice(["error", "allow"]),
        default="error",
        show_default=True,
        help="Refuse a layer with a scale that is NaN or infinite, or take it as it is stored.",
    )(function)


def json_option(function: F) -> F:
    """--json/--table; None leaves it to what standard output is."""
    return click.option(
        "--json/--table",
        "as_json",
        default=None,
        help="What to print. Default: tables on a terminal, JSON elsewhere.",
    )(function)


def verbose_option(function: F) -> F:
    """-v, on the group and on each verb."""
    return click.option(
        "-v",
        "--verbose",
        count=True,
        expose_value=False,
        callback=_start_logging,
        help="Report on standard error what is being done; -vv reports more.",
    )(function)


class _StderrHandler(logging.Handler):
    """Written through click, which looks sys.stderr up each time: a progress bar may stand in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        from qload.cli.text import escape

        click.echo(escape(self.format(record), keep="\n\t"), err=True)


def is_verbose(ctx: click.Context) -> bool:
    """Return whether -v is given, before or after the name of the command."""
    return bool(ctx.meta.get(VERBOSE_KEY))


def _start_logging(ctx: click.Context, _: click.Parameter, times: int) -> None:
    log = logging.getLogger("qload")
    if times:
        ctx.meta[VERBOSE_KEY] = True
    if not times or ctx.resilient_parsing or any(isinstance(h, _StderrHandler) for h in log.handlers):
        return
    handler, level = _StderrHandler(), log.level
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO if times == 1 else logging.DEBUG)

    @ctx.call_on_close
    def _stop() -> None:
        log.removeHandler(handler)
        log.setLevel(level)


class HtmlFile(click.Path):
    """A file that can be written, and Jinja, told before the work begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; a folder that is not there or cannot be written to, or no Jinja, is a usage error."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"{path.parent} is no directory that can be written to", param, ctx)
        if util.find_spec("jinja2") is None:
            self.fail('pages need Jinja: pip install "qload-weights[pictures]"', param, ctx)
        return path


def parse_device(device: str) -> "torch.device":
    """The CPU or a CUDA device of this machine; ArgumentError for any other."""
    from qload.errors import ArgumentError
    from qload.weights.places import device_of

    where = device_of(device)
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError("device", "cpu or a CUDA device", str(where))
    return where
