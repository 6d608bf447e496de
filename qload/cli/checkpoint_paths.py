"""Checkpoint paths on the command line: directories, files, and models of the Hugging Face hub."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from os import PathLike, listdir
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.progress import Update, is_stderr_terminal, progress_bar
from qload.cli.text import escape, format_count, format_size

if TYPE_CHECKING:
    from qload.hub import HubFolder, HubId

log = logging.getLogger("qload")

CHECKPOINT_SUFFIXES = (".safetensors", ".safetensors.index.json")


def parse_hub_id(text: str) -> "HubId | None":
    """Parse `org/model[@revision]`; None for a path."""
    if text.count("/") == 0 or Path(text).exists():  # for most paths, before anything is imported
        return None
    from qload.hub import parse_id

    hub_id = parse_id(text)
    if hub_id is None and parse_id(f"{text}@main") is not None:
        folder = text.partition("/")[0]
        reason = f"{text} is read as a path, because {folder} is a directory"
        _print_stderr(f"{reason}; {text}@main names the model of the hub")
    return hub_id


@contextmanager
def open_path(
    path: "Path | HubId", *, whole: bool = False, quiet: bool = False
) -> "Iterator[str | PathLike[str]]":
    """Open a path, or a model of the hub as a folder.

    `whole`: fetch the files of a model into the cache, for a verb that reads every tensor. `quiet`: print
    nothing; another rank prints it.
    """
    if isinstance(path, Path):
        yield path
        return
    from qload.errors.exceptions import HubUnreachableError
    from qload.hub import cached_folder, fetch, open_folder

    def tell(text: str) -> None:
        if not quiet:
            _print_stderr(text)

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(open_folder(path))
        except HubUnreachableError as error:
            cached = cached_folder(path, error)
            tell(f"reading {path.repo} at commit {cached.folder.name} from the local cache: {error.detail}")
            yield cached
            return
        tell(f"reading {folder.listing.repo} at commit {folder.listing.commit} from the hub")
        if whole:
            _configure_hub_bars(visible=not quiet)
            folder = fetch(path, folder, tell)
        try:
            yield folder
        finally:
            tell(_transfer_text(folder))


@contextmanager
def open_with_progress(
    path: "Path | HubId", first: bool
) -> "Iterator[tuple[str | PathLike[str], Update | None]]":
    """Open a path for a verb that reads every tensor, with a progress bar on the first rank."""
    with open_path(path, whole=True, quiet=not first) as place, progress_bar(visible=first) as progress:
        yield place, progress


def _transfer_text(folder: "HubFolder") -> str:
    traffic = folder.traffic
    ranges = format_count(traffic.requests, "range")
    amount = f"{traffic.content} bytes ({format_size(traffic.content)}) in {ranges}"
    return f"read {amount} of {folder.listing.repo} from the hub"


def _configure_hub_bars(*, visible: bool) -> None:
    """Disable the progress bars of huggingface_hub wherever qload shows none."""
    from qload.cli.tables import is_color_disabled

    if not visible or is_color_disabled() or not is_stderr_terminal():
        import_module("huggingface_hub.utils").disable_progress_bars()


def _print_stderr(text: str) -> None:
    click.echo(escape(text), err=True)


def checkpoint_folders(paths: "Sequence[Path | HubId]") -> "Iterator[Path | HubId]":
    """List the folder of each file once, in order, without folders that have no checkpoint.

    Changed files include many a `config.json` of other projects. A model of the hub is listed as it is.
    """
    folders = (path.parent if isinstance(path, Path) and not path.is_dir() else path for path in paths)
    for folder in dict.fromkeys(folders):
        if not isinstance(folder, Path) or _has_checkpoint(folder):
            yield folder
        else:
            log.info("%s: skipped, it has no safetensors files", folder)


def _has_checkpoint(folder: Path) -> bool:
    try:
        return any(name.endswith(CHECKPOINT_SUFFIXES) for name in listdir(folder))
    except OSError:  # the verb reports it
        return True
