"""Whether the files of a checkpoint agree with each other and with the index that names them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from qload.errors import StorageError
from qload.storage.foreign import conventions, other_notes
from qload.storage.header import Header, read_header
from qload.storage.locate import CheckpointFiles


def check_index(located: CheckpointFiles, headers: Mapping[str, Header]) -> Iterator[StorageError]:
    """All that makes the tensors ambiguous or incomplete: loading raises the first, `verify` tells each.

    Nothing stored at all; a tensor that two files hold; every disagreement between index and headers; a file
    that the index does not name, that other programs read in its place, and that holds the same names.
    """
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name in holders:
                yield StorageError(file, "duplicate-tensor", f"is also in {holders[name]}", name)
            holders.setdefault(name, file)
    if not holders:
        where = located.index or ", ".join(list(headers)[:4])
        yield StorageError(where, "no-tensors", "holds no tensor", remedy="fetch the files again")
    if located.weight_map is None:
        return
    for name, file in located.weight_map.items():
        if file in headers and name not in headers[file].tensors:
            where = f"it is in {holders[name]}" if name in holders else "no file has it"
            yield StorageError(file, "index-mismatch", f"{located.index} says it is here, {where}", name)
    for name, file in holders.items():
        if name not in located.weight_map:
            yield StorageError(file, "index-mismatch", f"is here, and {located.index} does not name it", name)
    yield from _second_sources(located, holders)


def folder_notes(located: CheckpointFiles, headers: Mapping[str, Header]) -> Iterator[str]:
    """What differs and makes no tensor ambiguous: a total that is none, files that are not read."""
    tensors = [entry for header in headers.values() for entry in header.tensors.values()]
    stored = sum(entry.end - entry.begin for entry in tensors)
    headings = sum(header.file_size for header in headers.values()) - stored
    # Some writers count the headers too, which are up to twice as long with the metadata that copies lose.
    total = located.total_size
    if total is not None and not stored <= total <= stored + 2 * headings:
        yield f"{located.index} says total_size {total}; its tensors take {stored} bytes"
    if located.beside:
        shown = ", ".join(list(located.beside)[:4]) + (", ..." if len(located.beside) > 4 else "")
        if located.index is None:
            yield f"{len(located.beside)} files beside {next(iter(located.files))} are not read: {shown}"
        else:
            yield f"{located.index} names no tensor of {len(located.beside)} files beside it: {shown}"
    yield from other_notes(located.others)
    first = next(iter(located.files.values()), None)
    if isinstance(first, Path):
        yield from conventions(located.files, first.parent)


def _second_sources(located: CheckpointFiles, holders: Mapping[str, str]) -> Iterator[StorageError]:
    for file in located.rivals():
        try:
            names = read_header(located.beside[file], file).tensors.keys()
        except StorageError:  # nothing can be read in place of the index
            continue
        both = [name for name in names if name in holders]
        if both:
            more = f", and {len(both) - 1} tensors more" if len(both) > 1 else ""
            yield StorageError(
                file,
                "duplicate-tensor",
                f"is also in {holders[both[0]]}, as {located.index} has it{more}; some programs read the "
                "one, some the other",
                both[0],
                remedy="remove the one that is not meant",
            )
