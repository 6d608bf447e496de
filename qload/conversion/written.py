"""How a checkpoint is written, whatever it becomes: files, proof, certificate, and last the folder's name."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from os import PathLike
from os import path as paths
from pathlib import Path
from typing import Any, TypeVar

from qload.conversion.behind import behind
from qload.conversion.beside import CERTIFICATE, dumped
from qload.conversion.certificate import certificate, version
from qload.conversion.folder import UnfinishedFolder, check_target, hashed_file
from qload.conversion.report import WrittenCheckpoint
from qload.conversion.shards import OutputFile
from qload.conversion.source import source_files, unreadable
from qload.conversion.write import Progress, write_shards
from qload.errors import ArgumentError
from qload.listing import make_report
from qload.verify.crew import Crew
from qload.verify.subject import Subject

SHARD_SIZE = 5_000_000_000  # bytes
F = TypeVar("F", bound=WrittenCheckpoint)


@dataclass(frozen=True)
class NewCheckpoint:
    """All that will stand in the folder `target`, and what it is read from.

    `asked`: what was asked for, as the certificate says it; `job`: what else tells this run from others.
    `shards` hold tensors; `texts`: contents of small files, by name; `copies`: files that stay what they are.
    `crew`: who writes it.
    """

    subject: Subject
    target: Path
    asked: Mapping[str, Any]
    shards: Sequence[OutputFile]
    texts: Mapping[str, bytes]
    copies: Sequence[Path] = ()
    job: Sequence[Any] = ()
    crew: Crew = field(default_factory=lambda: Crew.of(None))

    def write(self, prove: Callable[[Path], F], tell: Progress) -> F:
        """Write it, and `prove` it: what is found has a `folder` where all is well; else nothing is left."""
        folder = UnfinishedFolder(self.target, self._job(), self.crew)
        with folder.opened(), behind("qload-hash") as hashing:
            if self.crew.first:
                folder.check_space(
                    sum(shard.nbytes for shard in self.shards) + sum(map(len, self.texts.values()))
                )
            folder.together()
            hashes = {
                name: hashing.later(partial(hashed_file, place))
                for name, place in self.crew.share(sorted(source_files(self.subject).items()))
            }
            write_shards(self.shards, folder, tell)
            if self.crew.first:
                self._write_beside(folder)
            folder.together()
            found = prove(folder.path)
            read = self.crew.told({name: file.result() for name, file in hashes.items()})
            if found.verdict == "ok":
                found = replace(found, folder=str(self.target))
            if self.crew.first:
                self._end(folder, found, {name: digest for each in read for name, digest in each.items()})
            folder.together()
            return found

    def _write_beside(self, folder: UnfinishedFolder) -> None:
        """What is no file of tensors."""
        for name, text in self.texts.items():
            folder.write(name, text)
        for file in self.copies:
            folder.write(file.name, file.read_bytes())

    def _end(self, folder: UnfinishedFolder, found: WrittenCheckpoint, read: Mapping[str, str]) -> None:
        """The folder by its name and with a certificate; of what is not well, nothing. `read`: hashes."""
        if found.verdict != "ok":
            folder.discard()
            return
        folder.write(CERTIFICATE, dumped(certificate(found, self.asked, read, folder.done)))
        folder.finish()

    def _job(self) -> str:
        """What is being written, and from what, as a hash."""
        files = {
            name: [place.stat().st_size, place.stat().st_mtime_ns]
            for name, place in source_files(self.subject).items()
        }
        told = [version(), dict(self.asked), list(self.job), files]
        digest = sha256(json.dumps(told, sort_keys=True).encode())
        for shard in self.shards:
            digest.update(shard.name.encode() + shard.header)
        return digest.hexdigest()


def target_of(folder: str | PathLike[str], shard_size: int) -> Path:
    """Where to write; ArgumentError where something is there, or files would hold nothing."""
    if shard_size < 1:
        raise ArgumentError("shard_size", "bytes, at least 1", str(shard_size))
    target = Path(paths.abspath(folder))
    check_target(target)
    return target


def of_checkpoint(path: str | PathLike[str], make: Callable[[Subject], F], empty: Callable[..., F]) -> F:
    """Report of `make` on a checkpoint; UnreadTensorsError if some of its tensors are not read.

    `empty`: builds the report of a path with the reason as `unreadable` or `unsupported`.
    """
    with closing(Subject.open(path)) as subject:
        reason = unreadable(subject)
        if reason is not None:
            return empty(subject.path, **reason)

        def make_of_all_read() -> F:
            error = subject.account.error()
            if error is not None:
                raise error
            return make(subject)

        # A file may fail, or be replaced, meanwhile.
        return make_report(
            make_of_all_read,
            lambda why: empty(subject.path, unreadable=why),
            lambda why: empty(subject.path, unsupported=why),
        )


def nothing(stage: str, done: int, total: int) -> None:
    """Nobody asked for progress."""
