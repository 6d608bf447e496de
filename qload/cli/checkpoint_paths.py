"""Checkpoint paths on the command line: directories, files, and models of the Hugging Face hub."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from os import PathLike, listdir
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.progress import is_stderr_terminal
from qload.cli.text import escape, format_count, format_size

if TYPE_CHECKING:
    from qload.hub import HubFolder, HubId


def parse_hub_id(text: str) -> "HubId | None":
    """`org/model[@revision]` if the text means that; None if it is a path."""
    if text.count("/") == 0 or Path(text).exists():  # most paths end here, before anything is imported
        return None
    from qload.hub import parse_id

    found = parse_id(text)
    if found is None and parse_id(f"{text}@main") is not None:
        here = text.partition("/")[0]
        _print_stderr(
            f"{text} is taken for a path, as {here} is a directory here; {text}@main means the hub's"
        )
    return found


@contextmanager
def open_path(
    path: "Path | HubId", *, whole: bool = False, quiet: bool = False
) -> "Iterator[str | PathLike[str]]":
    """What can be inspected: a path as it is, a name of the hub as a folder.

    `whole`: all of it will be read, so that its files are fetched into the cache. `quiet`: another process
    of the same command tells the user.
    """
    if isinstance(path, Path):
        yield path
        return
    from qload.errors.exceptions import HubUnreachableError
    from qload.hub import cached_folder, fetch, open_folder

    tell = _print_nothing if quiet else _print_stderr
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(open_folder(path))
        except HubUnreachableError as why:
            cached = cached_folder(path, why)
            tell(f"reading {path.repo} at commit {cached.folder.name} from the local cache: {why.detail}")
            yield cached
            return
        tell(f"reading {folder.listing.repo} at commit {folder.listing.commit} from the hub")
        if whole:
            _configure_hub_bars(not quiet)
            folder = fetch(path, folder, tell)
        try:
            yield folder
        finally:
            tell(_transfer_text(folder))


def _transfer_text(folder: "HubFolder") -> str:
    traffic = folder.traffic
    ranges = format_count(traffic.requests, "range")
    read = f"{traffic.content} bytes ({format_size(traffic.content)}) in {ranges}"
    return f"read {read} of {folder.listing.repo} from the hub"


def _configure_hub_bars(seen: bool) -> None:
    """The bars of huggingface_hub, which move the cursor, only where a bar of ours would be seen."""
    from qload.cli.tables import is_color_disabled

    if not seen or is_color_disabled() or not is_stderr_terminal():
        import_module("huggingface_hub.utils").disable_progress_bars()


def _print_stderr(text: str) -> None:
    click.echo(escape(text), err=True)


def _print_nothing(text: str) -> None:
    """Another process says it."""


CHECKPOINT_SUFFIXES = (".safetensors", ".safetensors.index.json")

log = logging.getLogger("qload")


def checkpoint_folders(paths: "Sequence[Path | HubId]") -> "Iterator[Path | HubId]":
    """Each folder once, in order, without those that hold no checkpoint: many a `config.json` lies in one.

    A model of the hub is what it is.
    """
    for folder in dict.fromkeys(_containing_folder(path) for path in paths):
        if not isinstance(folder, Path) or _has_checkpoint(folder):
            yield folder
        else:
            log.info("%s: passed over, there are no safetensors", folder)


def _containing_folder(path: "Path | HubId") -> "Path | HubId":
    return path.parent if isinstance(path, Path) and not path.is_dir() else path


def _has_checkpoint(folder: Path) -> bool:
    try:
        return any(name.endswith(CHECKPOINT_SUFFIXES) for name in listdir(folder))
    except OSError:  # to be told by what opens it
        return True
