"""A name of the hub where a path is asked for: what it leads to, and what standard error is told of that."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qload.cli.progress import watched
from qload.cli.text import plural, safe, size

if TYPE_CHECKING:
    from qload.hub import HubFolder, HubId


def hub_id(text: str) -> "HubId | None":
    """`org/model[@revision]` if the text means that; None if it is a path."""
    if text.count("/") == 0 or Path(text).exists():  # most paths end here, before anything is imported
        return None
    from qload.hub import parse_id

    found = parse_id(text)
    if found is None and parse_id(f"{text}@main") is not None:
        here = text.partition("/")[0]
        _say(f"{text} is taken for a path, as {here} is a directory here; {text}@main means the hub's")
    return found


@contextmanager
def opened(
    path: "Path | HubId", *, whole: bool = False, quiet: bool = False
) -> "Iterator[str | PathLike[str]]":
    """What can be inspected: a path as it is, a name of the hub as a folder.

    `whole`: all of it will be read, so that its files are fetched into the cache. `quiet`: another process
    of the same command tells the user.
    """
    if isinstance(path, Path):
        yield path
        return
    from qload.errors.checkpoint import HubUnreachableError
    from qload.hub import cached_folder, fetch, open_folder

    tell = _nothing if quiet else _say
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
            _show_bars(not quiet)
            folder = fetch(path, folder, tell)
        try:
            yield folder
        finally:
            tell(_transferred(folder))


def _transferred(folder: "HubFolder") -> str:
    traffic = folder.traffic
    read = f"{traffic.content} bytes ({size(traffic.content)}) in {plural(traffic.requests, 'range')}"
    return f"read {read} of {folder.listing.repo} from the hub"


def _show_bars(seen: bool) -> None:
    """The bars of huggingface_hub, which move the cursor, only where a bar of ours would be seen."""
    from qload.cli.console import plain

    if not seen or plain() or not watched():
        import_module("huggingface_hub.utils").disable_progress_bars()


def _say(text: str) -> None:
    click.echo(safe(text), err=True)


def _nothing(text: str) -> None:
    """Another process says it."""
