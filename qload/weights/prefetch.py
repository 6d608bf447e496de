"""Read-ahead: threads read the slices of the next loads while the current one is repacked.

Native threads read contiguous slices of files, on the CPU straight to their place, for CUDA through pinned
buffers. Threads of Python read all other slices and storages. A slice that could not be read ahead is left
out without an error: its load reads it again, and raises in its own words.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, cycle
from math import prod
from operator import mul
from typing import Any, NamedTuple, Protocol, TypeAlias

from qload import devices, native
from qload.dtypes import TORCH
from qload.errors import QloadError
from qload.lazy_torch import Tensor, torch
from qload.sentences import Digit
from qload.storage import FileRange, FileRanges, FillingStorage, SafetensorsStorage, WeightStorage
from qload.storage.file_reads import Bounds
from qload.storage.protocol import AskedRows, bounds

log: logging.Logger = logging.getLogger("qload")

HOST_THREADS = 4  # more threads with host memory as their target wait for each other
DEVICE_THREADS = 8  # threads with a device as their target ask Python for little
HOST_RUN_BYTES = 4 << 20  # per read of a thread, so that several threads share a tensor
DEVICE_RUN_BYTES = 16 << 20  # larger, because each read of a thread holds Python's lock for a while
BUFFERS = 2  # per thread: one is copied to the device while the other is filled
ALIGNMENT = 64  # bytes, of tensors in a buffer
MIN_SHARED_BYTES = 4 << 20  # of a tensor that several threads read
MIN_RUN_BYTES = 512  # of a slice with gaps for native threads; shorter runs are read with their gaps
MAX_OPEN_FILES = 16  # in use by native threads at a time

Index = tuple[slice, ...]
Key = tuple[str, tuple[tuple[int | None, int | None], ...]]  # stored name, (start, stop) of each slice
TensorForm: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"  # shape and dtype


class FileMoveRequest(NamedTuple):
    """Move of elements of `bits` bits from a file to a target, by digits; without digits, a copy of bytes.

    To a CUDA device, the source may be `runs` ranges at a `distance`, which follow each other in the target.
    """

    source: FileRange
    target: Tensor
    bits: int = 8
    digits: Sequence[Digit] = ()
    runs: int = 1
    distance: int = 0


@dataclass(frozen=True)
class ElementsInFile:
    """Elements of a stored tensor as a range of a local file (`qload.loader.source.FileElements`)."""

    ranges: FileRanges
    place: FileRange
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.place.nbytes

    def move(self, target: Tensor, bits: int, digits: Sequence[Digit]) -> bool:
        """Move elements of `bits` bits by digits into `target`, new memory; False: the target is undefined.

        Another read of the elements then raises the error.
        """
        try:
            with self.ranges.descriptor(self.place.file) as descriptor:
                source = descriptor, self.place.begin, self.place.nbytes
                done = devices.move_from_file(source, target, bits, digits)
        except QloadError:
            return False
        if done:
            self.ranges.count(self.place.nbytes)
        return done


def find_file_elements(
    storage: WeightStorage, name: str, index: Index, device: torch.device
) -> ElementsInFile | None:
    """Elements of a stored tensor in their file; None for gaps, remote files and a GPU as the device."""
    if type(storage) is not SafetensorsStorage or device.type != "cpu":  # a subclass may read otherwise
        return None
    info = storage.info(name)
    place = storage.ranges.of(name, bounds(name, info.shape, index))
    return None if place is None else ElementsInFile(storage.ranges, place, TORCH[info.stored_dtype])


class OpenedFiles:
    """Descriptors of files in use by native threads, by name."""

    def __init__(self, pool: FilePool, descriptors: Mapping[str, int], opened: ExitStack) -> None:
        self.pool, self.descriptors, self._opened = pool, descriptors, opened
        self._is_open = True

    def close(self) -> bool:
        """Close the files; True if all are unchanged. False on any later call."""
        if not self._is_open:  # the first call was interrupted
            return False
        self._is_open = False
        self.pool.release(self.descriptors)
        try:
            self._opened.close()
        except QloadError:
            return False
        return True


class FilePool:
    """Open files of a storage, at most `MAX_OPEN_FILES`, with the number of their users."""

    def __init__(self, ranges: FileRanges) -> None:
        self.ranges = ranges
        self._users: dict[str, int] = {}

    def open(self, files: Iterable[str]) -> OpenedFiles | None:
        """Open files; None for changed files, and for too many."""
        names = dict.fromkeys(files)
        if len(self._users.keys() | names.keys()) > MAX_OPEN_FILES:
            return None
        with suppress(QloadError), ExitStack() as opened:
            descriptors = {file: opened.enter_context(self.ranges.descriptor(file)) for file in names}
            for file in names:
                self._users[file] = self._users.get(file, 0) + 1
            return OpenedFiles(self, descriptors, opened.pop_all())
        return None

    def release(self, files: Iterable[str]) -> None:
        """Remove a user of each file."""
        for file in files:
            self._users[file] -= 1
            if not self._users[file]:
                del self._users[file]


@dataclass(frozen=True, eq=False)
class NativeJob:
    """Moves in progress in native threads; their files stay open until `moved` is known."""

    reader: NativeReader
    ticket: int
    sizes: Sequence[int]  # bytes of each move
    opened: OpenedFiles

    @cached_property
    def moved(self) -> Sequence[bool]:
        """Success of each move, after all of them; a target without success is undefined."""
        moved = self.reader.wait(self.ticket, len(self.sizes))
        if not self.reader.release(self) or len(moved) < len(self.sizes):
            return [False for _ in self.sizes]
        for size, done in zip(self.sizes, moved, strict=True):
            self.reader.files.ranges.count(size if done else 0)
        return moved

    @property
    def is_done(self) -> bool:
        """True if all moves succeeded; on CUDA the current stream waits for the copies."""
        return all(self.moved)


class NativeReader:
    """Native threads that read the files of a storage to memory of the CPU or of a CUDA device.

    Parameters
    ----------
    files
        Pool of the storage's files.
    threads
        Threads of the CPU module, or of the CUDA module.
    home
        Stream of the targets' allocation; None for the CPU.
    """

    def __init__(
        self,
        files: FilePool,
        threads: devices.CpuFileMover | devices.CudaFileReader,
        home: torch.cuda.Stream | None = None,
    ) -> None:
        self.files, self.threads, self.home = files, threads, home
        self._jobs = set[NativeJob]()

    def begin(self, moves: Sequence[FileMoveRequest]) -> NativeJob | None:
        """Begin to move; None for changed files or too many, and for targets without native code."""
        threads, targets = self.threads, [move.target for move in moves]
        if isinstance(threads, devices.CpuFileMover) and not (
            threads.is_here and devices.has_routines(*targets)
        ):
            return None
        opened = self.files.open(move.source.file for move in moves)
        if opened is None:
            return None
        sources = [(opened.descriptors[move.source.file], *move.source[1:]) for move in moves]
        try:
            if isinstance(threads, devices.CpuFileMover):
                ticket = threads.begin(
                    [devices.FileMove(at, *move[1:4]) for at, move in zip(sources, moves, strict=True)]
                )
            else:
                assert self.home is not None
                ranges = [
                    (descriptor, begin, nbytes // move.runs, move.target.data_ptr(), move.runs, move.distance)
                    for (descriptor, begin, nbytes), move in zip(sources, moves, strict=True)
                ]
                ticket = threads.begin(ranges, self.home)
        except BaseException:
            opened.close()
            raise
        job = NativeJob(self, ticket, [move.source.nbytes for move in moves], opened)
        self._jobs.add(job)
        return job

    def wait(self, ticket: int, count: int) -> Sequence[bool]:
        """Success of each of `count` moves; shorter if unknown."""
        if isinstance(self.threads, devices.CpuFileMover):
            return self.threads.wait(ticket)
        try:
            return [self.threads.wait(ticket)] * count
        except RuntimeError as error:  # of the device; no load would report it
            log.warning("reading ahead failed, each load reads for itself: %r", error)
            return [False] * count

    def release(self, job: NativeJob) -> bool:
        """Close the files of a finished job; True if they are unchanged."""
        self._jobs.discard(job)
        return job.opened.close()

    def close(self) -> None:
        """Wait for the threads, and drop the jobs without a reader."""
        try:
            self.threads.close()
        finally:
            for job in list(self._jobs):
                self.release(job)


def native_reader(
    storage: object, device: torch.device, threads: int, home: torch.cuda.Stream | None = None
) -> NativeReader | None:
    """Native reader to a CPU, by so many threads, or to the CUDA device of the stream `home`.

    None for a storage without files, another device, and a machine without native threads or pinned memory.
    """
    if type(storage) is not SafetensorsStorage:  # a subclass may read otherwise
        return None
    reader: devices.CpuFileMover | devices.CudaFileReader | None = None
    if home is not None:
        try:
            reader = devices.file_reader(home.device)
        except RuntimeError as error:
            log.warning("files are read by threads of Python: %r", error)
    elif device.type == "cpu":
        reader = devices.file_mover(threads)
    return None if reader is None else NativeReader(FilePool(storage.ranges), reader, home)


@dataclass(frozen=True)
class Piece:
    """Contiguous elements of a stored tensor, and their target."""

    name: str
    index: Index
    out: Tensor

    @property
    def buffer_bytes(self) -> int:
        """Bytes in a buffer, with alignment."""
        return -(-self.out.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension, the unit of a read."""
        return prod(self.out.shape[1:]) * self.out.itemsize


class Staging(Protocol):
    """Memory for prefetched tensors, filled by threads of Python in reads of at most `run` bytes."""

    run: int

    def allocate(self, forms: Iterable[TensorForm]) -> list[Tensor]:
        """Allocate tensors."""

    def allocated(self) -> Any:
        """Event after the last allocation."""

    def fill(self, storage: FillingStorage, pieces: Sequence[Piece], allocated: Any) -> Any:
        """Read pieces of at most `run` bytes together, in a thread; returns the event of their arrival."""

    def wait(self, arrived: Any) -> None:
        """Let the current stream wait for the arrival."""

    def hand_over(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor for the current stream."""

    def close(self) -> None:
        """Wait for all copies; afterwards the memory may be freed."""


class HostStaging:
    """Host memory: threads read straight to the target, in large pages, which are cheaper to allocate."""

    run: int = HOST_RUN_BYTES

    def allocate(self, forms: Iterable[TensorForm]) -> list[Tensor]:
        """Allocate CPU tensors of these shapes and dtypes in large pages; threads read straight to them."""
        return [
            devices.in_large_pages(torch.empty(shape, dtype=dtype, device="cpu")) for shape, dtype in forms
        ]

    def allocated(self) -> None:
        """No event: the memory is ready."""

    def fill(self, storage: FillingStorage, pieces: Sequence[Piece], allocated: None) -> None:
        """Read pieces."""
        _read_pieces(storage, pieces, [piece.out.reshape(-1).view(torch.uint8) for piece in pieces])

    def wait(self, arrived: None) -> None:
        """Do nothing: the thread has ended."""

    def hand_over(self, tensor: Tensor) -> None:
        """Do nothing: there are no streams."""

    def close(self) -> None:
        """Do nothing: there are no copies."""


class PinnedBuffer:
    """Pinned host memory, the stream of its copies, and the event of the last copy."""

    def __init__(self, size: int, stream: torch.cuda.Stream) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self.stream = stream
        self.copied: torch.cuda.Event = stream.record_event()


class CudaStaging:
    """CUDA memory: each thread reads into its own pinned buffers, and copies them on its own stream.

    Allocations are on the caller's stream, and copies wait for earlier work of that stream.
    """

    def __init__(self, device: torch.device, run: int) -> None:
        self.home: torch.cuda.Stream = torch.cuda.current_stream(device)
        self.device: torch.device = self.home.device  # with a number: each thread has a current device
        self.run: int = run
        self._own, self._streams = threading.local(), list[torch.cuda.Stream]()

    def allocate(self, forms: Iterable[TensorForm]) -> list[Tensor]:
        """Allocate tensors on the device."""
        with nullcontext() if self._is_at_home() else torch.cuda.stream(self.home):
            return [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in forms]

    def allocated(self) -> torch.cuda.Event:
        """Event after all work of the caller's stream."""
        event: torch.cuda.Event = self.home.record_event()
        return event

    def fill(
        self, storage: FillingStorage, pieces: Sequence[Piece], allocated: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Read pieces into a buffer and copy them; returns the event of the copies."""
        buffer = next(self._buffers())
        starts = accumulate((piece.buffer_bytes for piece in pieces), initial=0)
        buffer.copied.synchronize()  # the last copy of the buffer
        places = [slice(at, at + piece.out.nbytes) for at, piece in zip(starts, pieces, strict=False)]
        _read_pieces(storage, pieces, [buffer.memory[place] for place in places])
        buffer.stream.wait_event(allocated)
        devices.copy_from_host(buffer.memory, places, [piece.out for piece in pieces], buffer.stream)
        buffer.copied = buffer.stream.record_event()
        return buffer.copied

    def wait(self, arrived: torch.cuda.Event) -> None:
        """Let the current stream wait for the copies; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(arrived)

    def hand_over(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor until the current stream has used it."""
        if not self._is_at_home():
            tensor.record_stream(torch.cuda.current_stream(self.device))

    def close(self) -> None:
        """Wait for all copies."""
        for stream in self._streams:
            stream.synchronize()

    def _is_at_home(self) -> bool:
        return devices.stream_on(self.device) == self.home.cuda_stream

    def _buffers(self) -> Iterator[PinnedBuffer]:
        buffers: Iterator[PinnedBuffer] | None = getattr(self._own, "buffers", None)
        if buffers is None:
            torch.cuda.set_device(self.device)  # of this thread, which has no other work
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            buffers = cycle([PinnedBuffer(self.run, stream) for _ in range(BUFFERS)])
            self._own.buffers = buffers
            self._streams.append(stream)
        return buffers


def _read_pieces(storage: FillingStorage, pieces: Sequence[Piece], memory: Sequence[Tensor]) -> None:
    """Read the bytes of each piece to memory, in one call if the storage can."""
    read_all = getattr(storage, "read_bytes_into", None)
    if read_all is not None:
        read_all([(piece.name, piece.index, row.numpy()) for piece, row in zip(pieces, memory, strict=True)])
        return
    for piece, row in zip(pieces, memory, strict=True):
        storage.read_into(piece.name, piece.index, row.view(piece.out.dtype).view(piece.out.shape))


def staging_on(device: torch.device, run: int) -> Staging:
    """Staging for a CUDA device, in reads of `run` bytes, else in host memory."""
    return CudaStaging(device, run) if device.type == "cuda" else HostStaging()


@dataclass(frozen=True, eq=False)
class PythonJob:
    """Read of some pieces by a thread of Python."""

    staging: Staging
    future: Future[Any]

    @cached_property
    def is_done(self) -> bool:
        """True if the read succeeded, after its end; the current stream waits for the copies."""
        error = CancelledError() if self.future.cancelled() else self.future.exception()
        if error is None:
            self.staging.wait(self.future.result())
        elif not isinstance(error, QloadError | CancelledError):  # no load would report it
            log.warning("reading ahead failed, each load reads for itself: %r", error)
        return error is None


@dataclass(frozen=True)
class Prefetch:
    """Prefetched tensors of a load, by slices; each is returned once."""

    staging: Staging
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    jobs: dict[Key, list[PythonJob | NativeJob]] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors at the first call, before any `take`."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def take(self, name: str, index: Index) -> Tensor | None:
        """Wait for slices of a tensor and return them; None if they were not prefetched."""
        key = _key(name, index)
        tensor = self.tensors.pop(key, None)
        return tensor if tensor is not None and self._arrives(key, tensor) else None

    def close(self) -> None:
        """Wait for the remaining reads."""
        while self.tensors:
            self._arrives(*self.tensors.popitem())

    def _arrives(self, key: Key, tensor: Tensor) -> bool:
        """Wait for all reads of a tensor; True if all of them succeeded."""
        done = [job.is_done for job in self.jobs.pop(key)]
        self.staging.hand_over(tensor)
        return all(done)


class Prefetcher:
    """Threads that read from a storage to a device, as a context manager; the exit waits for them.

    Attributes
    ----------
    native
        Native threads; None without them.
    """

    def __init__(self, storage: FillingStorage, device: torch.device, run: int = DEVICE_RUN_BYTES) -> None:
        self.storage: FillingStorage = storage
        self.staging: Staging = staging_on(device, run)
        threads = DEVICE_THREADS if device.type == "cuda" else min(HOST_THREADS, native.threads())
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="qload-read")
        home = self.staging.home if isinstance(self.staging, CudaStaging) else None
        self.native: NativeReader | None = native_reader(storage, device, threads, home)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:  # in reverse order, also after an error
            ending.callback(self.staging.close)
            if self.native is not None:
                ending.callback(self.native.close)
            ending.callback(self._threads.shutdown, wait=True, cancel_futures=True)

    def begin(self, slices: Iterable[tuple[str, Index]], storage: WeightStorage) -> Prefetch:
        """Begin to read slices in threads, native ones where possible; take them from the result."""
        wanted: dict[Key, tuple[Bounds, TensorForm]] = {}
        for name, index in slices:
            info = storage.info(name)
            pairs = bounds(name, info.shape, index)
            extents = tuple(stop - start for start, stop in pairs)
            if 0 not in extents:
                wanted[_key(name, index)] = pairs, (extents, TORCH[info.stored_dtype])
        prefetch = Prefetch(self.staging)
        if wanted:
            targets = self.staging.allocate(form for _, form in wanted.values())
            prefetch.tensors.update(zip(wanted, targets, strict=True))
            self._begin_in_python(prefetch, self._begin_natively(prefetch, wanted))
        return prefetch

    def _begin_natively(
        self, prefetch: Prefetch, wanted: Mapping[Key, tuple[Bounds, TensorForm]]
    ) -> dict[Key, Bounds]:
        """Begin slices in native threads; returns the bounds of all others, such as slices of short runs."""
        rest = {key: pairs for key, (pairs, _) in wanted.items()}
        if self.native is None:
            return rest
        least = MIN_RUN_BYTES if isinstance(self.native.threads, devices.CudaFileReader) else float("inf")
        places = {key: self.native.files.ranges.of_runs(key[0], pairs) for key, pairs in rest.items()}
        moves = {
            key: FileMoveRequest(place.range, prefetch.tensors[key], 8, (), place.number, place.distance)
            for key, place in places.items()
            if place is not None and (place.number == 1 or place.range.nbytes // place.number >= least)
        }
        job = self.native.begin(list(moves.values())) if moves else None
        if job is None:
            return rest
        prefetch.jobs.update({key: [job] for key in moves})
        return {key: pairs for key, pairs in rest.items() if key not in moves}

    def _begin_in_python(self, prefetch: Prefetch, wanted: Mapping[Key, Bounds]) -> None:
        run = self.staging.run
        pieces = {
            key: Piece(key[0], tuple(slice(*pair) for pair in pairs), prefetch.tensors[key])
            for key, pairs in wanted.items()
        }
        fitting = [(key, piece) for key, piece in pieces.items() if piece.row_bytes <= run]
        for key in pieces.keys() - dict(fitting).keys():  # one row exceeds a buffer
            del prefetch.tensors[key]
        allocated = self.staging.allocated() if fitting else None
        runs = [(key, part) for key, piece in fitting for part in _split_piece(piece, run)]
        for group in _group_pieces(runs, run):
            parts = [piece for _, piece in group]
            future = self._threads.submit(self.staging.fill, self.storage, parts, allocated)
            job = PythonJob(self.staging, future)
            for key in dict.fromkeys(key for key, _ in group):
                prefetch.jobs.setdefault(key, []).append(job)


def _key(name: str, index: Index) -> Key:
    return name, tuple((piece.start, piece.stop) for piece in index)


def read_to_cuda(storage: WeightStorage, name: str, index: Index, device: torch.device) -> Tensor:
    """Read elements of a stored tensor to a CUDA device, by several threads for a large tensor."""
    if isinstance(storage, FillingStorage):
        pairs = bounds(name, storage.info(name).shape, index)
        size = prod(stop - start for start, stop in pairs) * storage.info(name).stored_dtype.itemsize
        if size > MIN_SHARED_BYTES:
            with Prefetcher(storage, device, size // HOST_THREADS + 1) as prefetcher:
                tensor = prefetcher.begin([(name, index)], storage).take(name, index)
            if tensor is not None:
                return tensor
    return storage.read(name, index).to(device)


@dataclass(frozen=True, eq=False)
class BegunRows:
    """Reads of rows on one device by native threads.

    Attributes
    ----------
    left
        Entries that these threads do not read: rows with gaps, storages without files, few bytes.
    begun
        The other entries, each with the target of its rows and the number of its first move.
    order
        Numbers of the moves of `job`, in its order.
    reader, job
        The threads, and their job; None without one.
    """

    left: Sequence[AskedRows]
    begun: Sequence[tuple[AskedRows, Tensor, int]] = ()
    order: Sequence[int] = ()
    reader: NativeReader | None = None
    job: NativeJob | None = None

    def finish(self) -> list[AskedRows]:
        """Wait for the threads, and return the entries with failed reads."""
        done = [] if self.job is None else self.job.moved
        moved = {at for at, is_done in zip(self.order, done, strict=False) if is_done}
        self.close()
        failed = list[AskedRows]()
        for entry, target, first in self.begun:
            if not moved.issuperset(range(first, first + len(target))):
                failed.append(entry)
            elif target is not entry[2]:
                entry[2].copy_(target)
        return failed

    def close(self) -> None:
        """End the threads; a pending read is dropped."""
        if self.reader is not None:
            self.reader.close()


@dataclass(frozen=True, eq=False)
class RowReads:
    """Reads of rows in progress: `finish` or `close` ends them.

    Attributes
    ----------
    begun
        Reads by native threads, of each device.
    read
        Reads other rows on the calling thread.
    arrange
        Copies after all reads.
    """

    begun: Sequence[BegunRows]
    read: Callable[[Sequence[AskedRows]], None]
    arrange: Sequence[Callable[[], object]]

    def finish(self) -> None:
        """Read the other rows, and wait for the threads."""
        with ExitStack() as ending:
            ending.callback(self.close)
            self.read([entry for rows in self.begun for entry in rows.left])
            self.read([entry for rows in self.begun for entry in rows.finish()])
        for run in self.arrange:
            run()

    def close(self) -> None:
        """End the threads; the rows are undefined."""
        for rows in self.begun:
            rows.close()


def begin_rows_natively(storage: WeightStorage, asked: Sequence[AskedRows]) -> BegunRows:
    """Begin to read rows on one device in native threads, with one job for all."""
    if type(storage) is not SafetensorsStorage or sum(out.nbytes for *_, out in asked) <= MIN_SHARED_BYTES:
        return BegunRows(asked)
    device, ranges, left = asked[0][2].device, storage.ranges, list[AskedRows]()
    moves, begun = list[FileMoveRequest](), list[tuple[AskedRows, Tensor, int]]()
    for entry in asked:
        names, index, out = entry
        info = storage.info(names[0])
        pairs = bounds(names[0], info.shape, index)
        expected = (len(names), *(stop - start for start, stop in pairs)), TORCH[info.stored_dtype]
        places = ranges.of_rows(names, pairs) if (tuple(out.shape), out.dtype) == expected else None
        if places is None or not out.numel():
            left.append(entry)
            continue
        target, bits, digits = out, 8, list[Digit]()
        if not out[0].is_contiguous() and device.type == "cpu":
            bits, digits = 8 * out.itemsize, _row_digits(out[0])
        elif not out[0].is_contiguous():
            target = torch.empty(out.shape, dtype=out.dtype, device=device)
        begun.append((entry, target, len(moves)))
        moves += [FileMoveRequest(*each, bits, digits) for each in zip(places, target, strict=True)]
    home = torch.cuda.current_stream(device) if device.type == "cuda" else None
    reader = native_reader(storage, device, native.threads(), home) if moves else None
    if reader is None:
        return BegunRows(asked)
    order = sorted(range(len(moves)), key=lambda at: moves[at].source)  # of the files
    try:
        return BegunRows(left, begun, order, reader, reader.begin([moves[at] for at in order]))
    except BaseException:
        reader.close()
        raise


def _row_digits(row: Tensor) -> list[Digit]:
    """Digits of a copy from contiguous elements to the strides of a row."""
    sizes = [*row.shape[1:], 1]
    inner = accumulate(reversed(sizes), mul)
    return [Digit(*each) for each in zip(row.shape, [*inner][::-1], row.stride(), strict=True)]


def _split_piece(piece: Piece, max_bytes: int) -> Iterator[Piece]:
    """Split a piece along its first dimension into pieces that fit in a buffer; each row fits in one."""
    if not piece.out.ndim:
        yield piece
        return
    first, rows, step = piece.index[0].start, piece.out.shape[0], max_bytes // piece.row_bytes
    for at in range(0, rows, step):
        end = min(at + step, rows)
        yield replace(piece, index=(slice(first + at, first + end), *piece.index[1:]), out=piece.out[at:end])


def _group_pieces(pieces: Sequence[tuple[Key, Piece]], max_bytes: int) -> Iterator[list[tuple[Key, Piece]]]:
    """Group pieces that fit in a buffer together, so that small ones share a read."""
    group: list[tuple[Key, Piece]] = []
    size = 0
    for key, piece in pieces:
        if group and size + piece.buffer_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append((key, piece))
        size += piece.buffer_bytes
    if group:
        yield group
