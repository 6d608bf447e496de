"""Sums over connected GPUs: conditions of a connection, supported tensors, and the fallback to NCCL."""

import signal
import threading
import time
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import devices
from qload.devices import PeerSums, cuda_peers
from qload.errors import LostRankError
from qload.models.norm import Norm
from qload.parallel import Collectives, FakeWorld, peers, summed_and_normed
from qload.parallel.launcher import Interrupt
from qload.parallel.process_group import Rank, _TorchCollectives, with_peers
from qload.testing import assert_same_bits

CPU = torch.device("cpu")
WORLD = 3
MESSAGE_BYTES = 1 << 10


class Memory:
    """`PeerMemory` of a module without a GPU: memory of a world by handles."""

    most_ranks, most_rows, message_bytes = 8, 4, MESSAGE_BYTES

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.opened: list[bytes] = []
        self.calls: list[Any] = []
        self.refusal: str | None = None

    def handle(self) -> bytes:
        return bytes([self.rank]) * peers.HANDLE_BYTES

    def connect(self, handles: list[bytes]) -> None:
        if self.refusal:
            raise RuntimeError(self.refusal)
        self.opened = handles

    def sum(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def stop(self) -> None:
        self.calls.append("stop")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class Machine:
    """GPUs of the ranks of a world, and the memory that was created on them."""

    nodes: list[str] = field(default_factory=lambda: ["one"] * WORLD)
    cards: list[str] = field(default_factory=lambda: ["a", "b", "c"])
    without: set[int] = field(default_factory=set)  # ranks without a module
    refusing: set[int] = field(default_factory=set)  # ranks that cannot open memory
    created: dict[int, Memory] = field(default_factory=dict)
    own: Any = field(default_factory=threading.local)  # the rank of a thread

    def memory(self, rank: int, world: int) -> Memory:
        if rank in self.without:
            raise RuntimeError("no memory")
        self.created[rank] = Memory(rank, world)
        self.created[rank].refusal = "no access" if rank in self.refusing else None
        return self.created[rank]

    def properties(self, device: torch.device) -> Any:
        return SimpleNamespace(uuid=self.cards[self.own.rank])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class Created:
        most_ranks = Memory.most_ranks

        def __new__(cls, rank: int, world: int) -> Any:
            return made.memory(rank, world)

    module = SimpleNamespace(PeerMemory=Created)
    monkeypatch.setattr(cuda_peers, "module", lambda: module)
    monkeypatch.setattr(cuda_peers, "runs_on", lambda module, device: True)
    monkeypatch.setattr(cuda_peers, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(peers.platform, "node", lambda: made.nodes[made.own.rank])
    monkeypatch.setattr(torch.cuda, "get_device_properties", made.properties)
    monkeypatch.setattr(peers, "BOOT_FILE", peers.Path("/no such file"))
    return made


def connected(machine: Machine) -> list[PeerSums | None]:
    def work(group: Collectives) -> PeerSums | None:
        machine.own.rank = group.rank()
        return peers.connect_peers(group, CPU)

    return FakeWorld(WORLD).run(work)


def test_gpus_of_one_machine_open_each_others_memory(machine: Machine) -> None:
    found = connected(machine)

    assert all(found)
    handles = [bytes([rank]) * peers.HANDLE_BYTES for rank in range(WORLD)]
    assert [machine.created[rank].opened for rank in range(WORLD)] == [handles] * WORLD
    assert not any(memory.calls for memory in machine.created.values())


@pytest.mark.parametrize(
    "change",
    [
        {"nodes": ["one", "one", "another"]},
        {"cards": ["a", "b", "a"]},
        {"without": {1}},
        {"refusing": {2}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_rank_is_connected_unless_all_are(machine: Machine, change: dict[str, Any]) -> None:
    for name, value in change.items():
        setattr(machine, name, value)

    assert connected(machine) == [None] * WORLD
    assert all(memory.calls == ["close"] for memory in machine.created.values())


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> PeerSums:
    monkeypatch.setattr(cuda_peers, "stream", lambda tensor: 7)
    monkeypatch.setattr(cuda_peers, "on_device", lambda device: nullcontext())
    return PeerSums(Memory(0, 2), CPU)


def half(*shape: int) -> Tensor:
    return torch.ones(shape).half()


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        (half(2, 8), True),
        (half(2, 8).bfloat16(), True),
        (half(4, 4).T, True),
        (half(MESSAGE_BYTES // 2), True),
        (half(MESSAGE_BYTES // 2 + 8), False),
        (half(3, 4), False),
        (half(0, 8), False),
        (half(2, 8).float(), False),
        (half(2, 8).to("meta"), False),
    ],
)
def test_a_kernel_takes_short_messages_of_16_bits(sums: PeerSums, values: Tensor, taken: bool) -> None:
    y = sums.summed(values)

    assert (y is not None) == taken
    calls: Any = sums._native.calls
    assert len(calls) == taken
    if y is not None:
        _, x, weight, total, to, sizes, _, bfloat16, stream = calls[0]
        assert (x, weight, total, to, sizes) == (0, 0, 0, y.data_ptr(), (1, values.numel()))
        assert (bfloat16, stream) == (values.dtype == torch.bfloat16, 7)
        assert y.shape == values.shape
        assert y.is_contiguous()


def test_values_at_any_address_are_read_from_an_aligned_one(sums: PeerSums) -> None:
    values = half(17)[1:]
    assert values.data_ptr() % cuda_peers.ALIGNMENT

    sums.summed(values)

    calls: Any = sums._native.calls
    assert calls[0][0] % cuda_peers.ALIGNMENT == 0


def test_values_with_gradients_and_closed_memory_have_no_kernel(sums: PeerSums) -> None:
    values = half(2, 8).requires_grad_()
    assert sums.summed(values) is None
    with torch.no_grad():
        assert sums.summed(values) is not None
    sums.stop()
    sums.close()
    sums.close()
    sums.stop()

    assert sums.summed(half(2, 8)) is None
    calls: Any = sums._native.calls
    assert calls[1:] == ["stop", "close"]


@pytest.mark.parametrize(
    ("rows", "size", "change", "taken"),
    [
        (4, 16, {}, True),
        (5, 16, {}, False),  # more rows than blocks
        (4, 12, {}, False),
        (4, 16, {"x": half(4, 8)}, False),
        (4, 16, {"weight": torch.ones(16)}, False),
    ],
)
def test_a_kernel_norms_rows_of_the_size_of_the_weight(
    sums: PeerSums, rows: int, size: int, change: dict[str, Tensor], taken: bool
) -> None:
    operands = {"values": half(rows, size), "x": half(rows, size), "weight": half(size), **change}

    found = sums.summed_and_normed(**operands, eps=0.5)

    assert (found is not None) == taken
    if found is not None:
        calls: Any = sums._native.calls
        *_, total, to, sizes, eps, _, _ = calls[0]
        assert (total, to) == (found[0].data_ptr(), found[1].data_ptr())
        assert (sizes, eps) == ((rows, size), 0.5)


class Summing(PeerSums):
    """Sums of a world of two whose other rank has twice the values."""

    def __init__(self, takes: bool) -> None:
        super().__init__(Memory(0, 2), CPU)
        self.does_sum = takes

    def summed(self, values: Tensor) -> Tensor | None:
        return values * 3 if self.does_sum else None

    def summed_and_normed(self, values: Tensor, x: Tensor, weight: Tensor, eps: float) -> Any:
        return (x + values * 3, weight) if self.does_sum else None


@pytest.mark.parametrize("takes", [True, False])
def test_a_group_sums_by_connected_gpus_or_else_by_its_own_call(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_TorchCollectives, "_reduce", lambda self, values, operation: values * 5)
    group = torch.distributed.ProcessGroup(0, 2)
    ranks = with_peers(_TorchCollectives(0, 2, weakref.ref(group)), Summing(takes))
    values, norm = torch.ones(2, 8), Norm(torch.full((8,), 2.0), 1e-5)

    assert_same_bits(ranks.summed(values), values * (3 if takes else 5))
    total, normed = norm.of_sum(values, values, ranks)
    assert_same_bits(total, values * (4 if takes else 6))
    assert_same_bits(normed, norm.weight if takes else norm(total))


def test_a_group_without_connected_gpus_is_returned_as_it_is() -> None:
    found: list[Any] = FakeWorld(1).run(lambda group: (group, with_peers(group, None)))

    assert found[0][0] is found[0][1]
    assert summed_and_normed(found[0][0], half(8), half(8), half(8), 0.0) is None
    assert not hasattr(Rank(0, 1), "peers")
    assert devices.PeerSums is PeerSums


def test_waits_of_a_gpu_end_before_the_error_of_another_rank_is_raised() -> None:
    interrupts = list[Interrupt]()
    ended, before = threading.Event(), signal.getsignal(signal.SIGTERM)

    def fail() -> None:
        raise RuntimeError("no wait")

    def wait() -> None:
        with Interrupt() as interrupt:
            interrupts.append(interrupt)
            interrupt.before_raising += [fail, ended.set]
            interrupt.raise_in_main_thread(LostRankError(1, 2, "gone"))
            time.sleep(600)

    with pytest.raises(LostRankError, match="rank 1 of 2"):
        wait()
    assert ended.is_set()
    assert interrupts[0].before_raising == []  # a reference would keep the threads of the group
    signal.signal(signal.SIGTERM, before)
