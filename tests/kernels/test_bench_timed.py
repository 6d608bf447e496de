"""Which times the bench shows, its graphs and events played by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bench import linear, timing
from tests.bench.linear import Group, timed

pytestmark = pytest.mark.usefixtures("seen_texts")

W = torch.eye(64).half()
X = torch.arange(3 * 64).view(3, 64).half()


class Graph:
    """Replays what was called while it was captured, into what those calls returned."""

    captured: "Graph"

    def __init__(self) -> None:
        self.replays = 0
        Graph.captured = self

    def replay(self) -> None:
        self.replays += 1


class Event:
    """Each graph takes 6 milliseconds."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: "Event") -> float:
        return 6.0


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"Stream": lambda: None, "stream": nullcontext, "synchronize": lambda: None, "Event": Event}
    for name, fake in names.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: nullcontext())


def product(x: Tensor) -> Tensor:
    return x @ W.T


def once() -> Callable[[Tensor], Tensor]:
    """Right in its first call, then never."""
    calls: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        calls.append(x)
        return product(x) if len(calls) == 1 else product(x) * 0

    return call


def refuses(x: Tensor) -> Tensor:
    raise TypeError("its signature has changed\nand more")


def test_a_time_is_that_of_one_call() -> None:
    found = timing.replayed([[lambda: 1, lambda: 2, lambda: 3]], rounds=4)

    assert found == [(6.0 * 1000 / 12, 1)]
    assert Graph.captured.replays == timing.REPLAYS + 2


def test_what_power_limits_runs_alone_before_it_is_timed() -> None:
    found = timing.sustained([[lambda: 1, lambda: 2]])

    rounds, replays = timing.rounds_of(2), round(timing.SUSTAINED * 1000 / 6)
    assert found == [(6.0 / replays * 1000 / (2 * rounds), 1)]
    assert Graph.captured.replays == timing.TURNS * (1 + 2 * replays)


def test_from_128_tokens_on_each_way_runs_alone() -> None:
    few, many = (torch.ones(tokens, 64).half() for tokens in (linear.LIMITED - 1, linear.LIMITED))
    replays = {}
    for x in (few, many):
        timed({("us",): Group([product], x, W)})
        replays[len(x)] = Graph.captured.replays

    assert replays[linear.LIMITED - 1] == timing.REPLAYS + 2 < replays[linear.LIMITED]


def test_only_what_is_right_before_and_after_has_a_time() -> None:
    found = timed({
        ("us",): Group([product, product], X, W),
        ("plain",): Group([lambda x: product(x) * 1.01], X, W),
        ("kernels", "a"): Group([once(), product], X, W),
        ("peers", "none"): "not installed",
        ("peers", "changed"): Group([refuses], X, W),
    })  # fmt: skip

    assert found == {
        ("us",): 6000.0 / 12,
        ("plain",): None,
        ("kernels", "a"): None,
        ("peers", "none"): "not installed",
        ("peers", "changed"): "its signature has changed",
    }


def test_a_kernel_of_ours_that_fails_ends_the_run() -> None:
    with pytest.raises(TypeError, match="its signature"):
        timed({("us",): Group([refuses], X, W)})


def test_a_peer_that_no_graph_holds_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = timing._captured

    def refused(calls: Any, rounds: int, stream: Any) -> Any:
        if len(calls) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return captured(calls, rounds, stream)

    monkeypatch.setattr(timing, "_captured", refused)
    found = timed({("us",): Group([product, product], X, W), ("peers", "p"): Group([product], X, W)})

    assert found == {("us",): 500.0, ("peers", "p"): "operation not permitted when stream is capturing"}


def test_a_cell_shows_how_much_longer_a_peer_takes() -> None:
    row = {"layout": "strips", "K": 64, "N": 64, "M": 3, "floor": 2.0, "limit": 2.5, "us": 5.0, "plain": 6.0}
    row |= {"fp16": 10.0, "kernels": {"a": None, "b": 5.0}, "peers": {"p": 15.0, "q": None, "r": "why not"}}

    shown = linear.cells(row, ["p", "q", "r"])

    assert shown == [
        "strips",
        "64 x 64",
        "3",
        "2.0",
        "2.5",
        "5.0",
        "2.00",
        "6.0",
        "10.0",
        "2.00",
        "b",
        "15.0 (3.00x)",
        "wrong",
        "-",
    ]
    assert linear.cells(row | {"us": None, "kernels": {"a": None}}, [])[-1] == ""
