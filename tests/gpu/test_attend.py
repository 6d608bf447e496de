"""Attention of a token over pages: within the rounding of its formula, and no key read that is not seen."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.kernels.bounds import Bounded, excess, roundings
from qload.kernels.cuda.decoder_ops import attend_pages
from qload.testing import assert_same_bits
from tests.gpu.device_tensors import GUARD, guarded
from tests.gpu.layers import DTYPES

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Case:
    """Heads, sizes and pages of a call, and the positions of its tokens."""

    positions: tuple[int, ...]
    heads: int = 8
    kv: int = 2
    k_size: int = 128
    v_size: int = 128
    page_size: int = 16
    more: int = 0  # numbers that heads of the cache have besides
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False

    @property
    def pages(self) -> int:
        """Of the longest sequence."""
        return max(self.positions) // self.page_size + 1


CASES = {
    "one key": Case((0,)),
    "borders of pages": Case((15, 16, 17)),
    "a key more than all blocks have at once": Case((511, 512, 513, 2047)),
    "long": Case((3000,), heads=32, kv=8),
    "many sequences": Case(tuple(range(3, 3 + 16 * 19, 19)), heads=32, kv=8),
    "64": Case((100, 7), k_size=64, v_size=64, heads=8, kv=1),
    "80": Case((100, 7), k_size=80, v_size=80),
    "96": Case((33, 350), k_size=96, v_size=96, heads=4, kv=4),
    "192 and 128": Case((70, 700), k_size=192, v_size=128, heads=16, kv=16),
    "64 and 8": Case((40, 3), k_size=64, v_size=8, heads=3, kv=3),
    "8 and 64": Case((40, 3), k_size=8, v_size=64, heads=6, kv=3),
    "256": Case((40, 300), k_size=256, v_size=256, heads=16, kv=2),
    "groups of 2": Case((77, 0), heads=4, kv=2),
    "groups of 3": Case((77, 0), heads=6, kv=2),
    "groups of 5": Case((77, 0), heads=40, kv=8),
    "groups of 7": Case((600,), heads=28, kv=4),
    "groups of 9": Case((600, 2), heads=18, kv=2),
    "groups of 20": Case((600, 2), heads=20, kv=1),
    "wider in the cache": Case((50, 9), k_size=96, v_size=64, more=32),
    "window": Case((900, 5, 127, 128, 129), window=128),
    "window of one": Case((40,), window=1),
    "chunk": Case((900, 5, 63, 64, 65), chunk=64),
    "window and chunk": Case((900, 5, 70), window=48, chunk=64),
    "sinks": Case((200, 0, 31), heads=64, kv=8, k_size=64, v_size=64, sinks=True, window=128),
    "pages of 1": Case((37, 5), page_size=1),
    "pages of 7": Case((37, 200), page_size=7),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
FEW = pytest.mark.parametrize("name", ["long", "window and chunk", "sinks", "192 and 128"])


class Pages:
    """Random numbers of a case; whatever no token sees is NaN. `width`: pages of each row of the table."""

    def __init__(self, case: Case, dtype: torch.dtype, width: int | None = None) -> None:
        self.case, self.S = case, len(case.positions)
        make = torch.Generator(device="cuda").manual_seed(len(case.positions) + sum(case.positions))
        count = 1 + self.S * case.pages
        wide = case.k_size + case.more, case.v_size + case.more
        self.cache = tuple(
            torch.full((count, case.page_size, case.kv, size), float("nan"), device="cuda", dtype=dtype)
            for size in wide
        )
        order = 1 + torch.randperm(self.S * case.pages, generator=make, device="cuda")
        self.table = torch.zeros(self.S, width or case.pages, dtype=torch.int64, device="cuda")
        self.table[:, : case.pages] = order.view(self.S, -1)
        self.positions = torch.tensor(case.positions, device="cuda")
        self.q = torch.randn(self.S, case.heads, case.k_size, generator=make, device="cuda").to(dtype)
        self.sinks = torch.randn(case.heads, generator=make, device="cuda").to(dtype) if case.sinks else None
        self.scale = 2 * case.k_size**-0.5
        for s, seen in enumerate(self.seen()):
            rows = [held[self.table[s]].flatten(0, 1) for held in self.cache]
            for held, size, own in zip(self.cache, (case.k_size, case.v_size), rows, strict=True):
                own[seen, :, :size] = torch.randn(len(seen), case.kv, size, generator=make, device="cuda").to(
                    dtype
                )
                held[self.table[s, : case.pages]] = own.view(-1, *held.shape[1:])[: case.pages]

    def seen(self) -> list[list[int]]:
        """The keys that each token sees."""
        case = self.case
        return [
            [
                n
                for n in range(at + 1)
                if (case.window is None or n > at - case.window)
                and (case.chunk is None or n // case.chunk == at // case.chunk)
            ]
            for at in case.positions
        ]

    def attend(self, v_size: int | None = None) -> Tensor:
        """By the kernel."""
        case = self.case
        y = attend_pages(
            self.q, self.cache, self.positions, self.table, v_size=v_size or case.v_size, scale=self.scale,  # type: ignore[arg-type]
            window=case.window, chunk=case.chunk, sinks=self.sinks,
        )  # fmt: skip
        assert y is not None
        return y

    def want(self) -> Bounded:
        """By the formula, one sequence after another, and what float32 may be off by."""
        found = [self._of(s, seen) for s, seen in enumerate(self.seen())]
        return Bounded(*(torch.stack(each) for each in zip(*found, strict=True)))

    def _of(self, s: int, seen: list[int]) -> tuple[Tensor, Tensor]:
        case, group = self.case, self.case.heads // self.case.kv
        k, v = (
            held[self.table[s]].flatten(0, 1)[seen, :, :size].double().repeat_interleave(group, 1)
            for held, size in zip(self.cache, (case.k_size, case.v_size), strict=True)
        )
        q = self.q[s].double()
        scores = torch.einsum("hd,nhd->hn", q, k) * self.scale
        sizes = torch.einsum("hd,nhd->hn", q.abs(), k.abs()).amax(1, keepdim=True) * self.scale
        column = scores.new_empty(case.heads, 0) if self.sinks is None else self.sinks.double()[:, None]
        weights = torch.cat([scores, column], 1).softmax(1)[:, : len(seen)]
        # A score is a sum of products, scaled, less a maximum, in units of log 2. Each key may raise the
        # maximum, for an exponential of 4 units and 2 products, and so may each of the sums that become one.
        off = roundings(case.k_size + 8) * sizes
        if self.sinks is not None:
            off = off + roundings(8) * self.sinks.double().abs()[:, None]
        share = (2 * off).expm1() + roundings(8 * (len(seen) + 32))
        return torch.einsum("hn,nhd->hd", weights, v), share * torch.einsum("hn,nhd->hd", weights, v.abs())


@DTYPES
@EVERY
def test_a_token_sees_what_the_formula_says_and_reads_nothing_else(case: Case, dtype: torch.dtype) -> None:
    pages = Pages(case, dtype)
    y = pages.attend()

    assert y.shape == (pages.S, case.heads, case.v_size)
    assert float(excess(y, pages.want()).max()) <= 1


@FEW
def test_pages_that_nobody_has_yet_change_no_bit(name: str) -> None:
    case = CASES[name]
    one, other = (Pages(case, torch.float16, width) for width in (None, 4 * case.pages))

    assert_same_bits(one.attend(), one.attend())
    assert_same_bits(other.attend(), one.attend())


def test_a_nan_that_is_seen_is_in_the_result_and_in_no_others() -> None:
    pages = Pages(Case((40, 20)), torch.float16)
    pages.cache[1][pages.table[0, 1], 3, 1, 9] = float("nan")
    y = pages.attend()

    assert y.isnan().nonzero().tolist() == [[0, head, 9] for head in range(4, 8)]
    pages.cache[0][pages.table[1, 1], 2, 0, 5] = float("nan")
    assert pages.attend()[1].isnan().all(-1).tolist() == [True] * 4 + [False] * 4


def test_large_scores_overflow_nothing() -> None:
    pages = Pages(Case((600,)), torch.float16)
    pages.q *= 1000
    y = pages.attend()

    assert y.isfinite().all()
    assert float(excess(y, pages.want()).max()) <= 1


def test_nothing_beside_the_result_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, (y, memory) = Pages(Case((70, 3)), torch.float16), guarded((2, 8, 128), torch.float16)
    monkeypatch.setattr(Tensor, "new_empty", lambda own, *shape, **more: y)

    assert pages.attend().data_ptr() == y.data_ptr()
    assert y.isfinite().all()
    assert not (y == 77).any()
    for guard in (memory[:GUARD], memory[-GUARD:]):
        assert (guard == 77).all()


def test_what_no_kernel_takes_is_left_to_torch_and_what_does_not_fit_is_refused() -> None:
    pages = Pages(Case((3,)), torch.float16)
    options = {"scale": 1.0, "v_size": 128}
    at = pages.positions, pages.table
    keys, values = pages.cache

    assert attend_pages(pages.q.float(), (keys.float(), values.float()), *at, **options) is None  # type: ignore[arg-type]
    assert attend_pages(pages.q.bfloat16(), (keys, values), *at, **options) is None  # type: ignore[arg-type]
    assert attend_pages(pages.q[..., :12], (keys, values), *at, **options) is None  # type: ignore[arg-type]
    assert attend_pages(pages.q, (keys, values), *at, scale=1.0, v_size=12) is None
    with pytest.raises(ArgumentError, match=r"^q\n"):
        attend_pages(pages.q[:, :7], (keys, values), *at, **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^positions\n"):
        attend_pages(pages.q, (keys, values), at[0].int(), at[1], **options)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^values\n"):
        attend_pages(pages.q, (keys, values[:, :, :1].contiguous()), *at, **options)  # type: ignore[arg-type]


def test_the_operator_is_as_it_says() -> None:
    pages = Pages(Case((20, 3), sinks=True), torch.float16)
    assert pages.sinks is not None
    arguments = (
        pages.q,
        *pages.cache,
        pages.positions,
        pages.table,
        pages.sinks.float(),
        128,
        pages.scale,
        16,
        0,
    )
    torch.library.opcheck(torch.ops.qload.attend_pages.default, arguments)
