"""The checks themselves, on kernels whose fault is known."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from qload.errors import ArgumentError
from qload.layouts import StoredMinusOnePerField, StoredMinusOneUnmasked, ZeroPoints
from qload.spec import Weight
from qload.testing import (
    Guards,
    Traits,
    around_borders,
    assert_reads_back,
    assert_same_bits,
    assert_same_twice,
    assert_sums_exactly,
    assert_within_bound,
    derived_bound,
    exact_sums,
    layer_of,
    read_back,
)
from qload.verify.comparison import equal_bits

pytestmark = pytest.mark.usefixtures("seen_texts")

HALF = torch.float16


def weight_of(K: int = 512) -> Weight:
    return layer_of(Traits("gptq", 4, 128, zeros="v1"), 64, K).weight()


def kernel_of(weight: Weight) -> Callable[[Tensor], Tensor]:
    w = weight.dequantize()
    return lambda x: (x.float() @ w.to(x.dtype).float().T).to(x.dtype)


def test_a_kernel_is_read_back_in_slices_of_its_inputs() -> None:
    weight, calls = weight_of(), []

    def kernel(x: Tensor) -> Tensor:
        calls.append(tuple(x.shape))
        return kernel_of(weight)(x)

    assert torch.equal(read_back(kernel, 512, HALF), weight.dequantize().half())
    assert calls == [(256, 512), (256, 512)]


def test_one_wrong_element_is_placed() -> None:
    weight = weight_of()

    def kernel(x: Tensor) -> Tensor:
        y = kernel_of(weight)(x)
        y[:, 7] += x[:, 300]
        return y

    with pytest.raises(
        AssertionError, match=r"at \(n, k\) = \(7, 300\).*1 of 32768 .*n 7 to 7, k 300 to 300"
    ):
        assert_reads_back(kernel, weight, HALF)


@pytest.mark.parametrize("wrong", [lambda y: y[:-1], lambda y: y[0]])
def test_a_result_of_another_shape_is_said(wrong: Callable[[Tensor], Tensor]) -> None:
    weight = weight_of()

    with pytest.raises(AssertionError, match="expected \\(256, N\\)"):
        assert_reads_back(lambda x: wrong(kernel_of(weight)(x)), weight, HALF)


def test_sums_are_the_same_for_fewer_tokens() -> None:
    weight = weight_of()
    x, want = exact_sums(weight, HALF, 9)
    few, less = exact_sums(weight, HALF, 4)

    assert torch.equal(x[:4], few)
    assert torch.equal(want[:4], less)
    assert torch.equal(kernel_of(weight)(x), want)


def test_the_bound_grows_with_what_a_kernel_may_lose() -> None:
    weight, x = weight_of(), torch.ones(2, 512).half()
    plain = derived_bound(x, weight).error

    for options in (
        {"accumulate": HALF},
        {"split_k": 4, "partials": HALF},
        {"scales": torch.bfloat16},
        {"accumulate": torch.bfloat16, "expected": ArgumentError},
    ):
        if options.pop("expected", None):
            with pytest.raises(ArgumentError, match="enough bits for 512 additions"):
                derived_bound(x, weight, **options)
        else:
            assert bool((derived_bound(x, weight, **options).error > plain).all())
    two, four = (derived_bound(x, weight, split_k=parts, partials=HALF).error for parts in (2, 4))
    assert bool((four > two).all())
    with pytest.raises(ArgumentError, match=r"split_k\n  expected at least 1"):
        derived_bound(x, weight, split_k=0)


def test_the_bound_is_met_by_a_sound_kernel_and_not_by_one_that_rounds_partial_sums() -> None:
    weight, narrow = weight_of(), torch.bfloat16
    w = weight.dequantize().half().float()
    x = torch.stack([w[0].sign(), w[1].sign()]).half()  # sums as large as they can be

    def split(x: Tensor) -> Tensor:
        parts = [(x[:, k : k + 128].float() @ w[:, k : k + 128].T).to(narrow) for k in range(0, 512, 128)]
        return (((parts[0] + parts[1]) + parts[2]) + parts[3]).half()

    assert 0 < assert_within_bound(kernel_of(weight), weight, x) <= 1
    assert assert_within_bound(split, weight, x, split_k=4, partials=narrow) <= 1
    wide, narrowed = (derived_bound(x, weight, split_k=4, partials=kind).error for kind in (HALF, narrow))
    assert bool((wide < narrowed).all())
    with pytest.raises(AssertionError, match="times as far off as rounding can cost"):
        assert_within_bound(split, weight, x)
    twice = partial(assert_within_bound, lambda x: split(x) * 2, weight, x)
    with pytest.raises(AssertionError) as caught:
        twice(split_k=4, partials=narrow)
    with pytest.raises(AssertionError) as whole:
        twice(partials=narrow)
    with pytest.raises(AssertionError) as scaled:
        twice(split_k=4, partials=narrow, scales=narrow)
    with pytest.raises(AssertionError) as accumulated:
        twice(split_k=4, partials=narrow, accumulate=HALF)
    errors = [
        float(str(each.value).split(" is ")[1].split()[0]) for each in (whole, caught, scaled, accumulated)
    ]
    assert errors[0] > errors[1] > max(errors[2:])  # each rounding that is allowed widens the bound


def test_a_failure_shows_the_line_of_the_test_and_none_of_the_checks() -> None:
    weight, guards = weight_of(), Guards()
    overwritten = guards.around("x", torch.ones(3))
    overwritten.zero_()
    x, calls = torch.ones(2, 512).half(), iter(range(9))
    checks: tuple[Callable[[], object], ...] = (
        lambda: assert_same_bits(x, x[:1]),
        lambda: read_back(lambda x: x[0], 512, HALF),
        lambda: assert_reads_back(lambda x: x[:, :64], weight, HALF),
        lambda: assert_sums_exactly(lambda x: x[:, :64], weight, HALF),
        lambda: assert_within_bound(lambda x: x[:, :64], weight, x),
        lambda: assert_same_twice(lambda x: x + next(calls), x),
        guards.assert_whole,
    )
    for check in checks:
        with pytest.raises(AssertionError) as caught:
            check()

        shown = [entry.path.name for entry in caught.traceback.filter(caught)]
        assert set(shown) == {"test_checks.py"}


@pytest.mark.parametrize("shape", [(1, 1), (1,), ()])
def test_bits_of_one_element_are_compared_at_any_stride(shape: tuple[int, ...]) -> None:
    one, other = (
        torch.full((64,), value).half()[::64].as_strided(shape, (64,) * len(shape)) for value in (1, 2)
    )

    assert_same_bits(one, one)
    with pytest.raises(AssertionError, match="1 of 1 differ"):
        assert_same_bits(one, other)
    assert not equal_bits(one, other)


def test_bits_that_change_between_calls_are_seen() -> None:
    calls = iter(range(9))

    with pytest.raises(AssertionError, match="1 of 4 differ, first at"):
        assert_same_twice(lambda x: x + torch.tensor([0, 0, 0, next(calls)]), torch.zeros(4))


def test_tensors_are_guarded_wherever_they_lie() -> None:
    guards, inner = Guards(), torch.arange(6, dtype=torch.int32)

    held = guards.around("b", {"a": [inner, (torch.ones(2), 3)], "w": weight_of(128)})
    guards.assert_whole()

    assert torch.equal(held["a"][0], inner)
    assert held["a"][1][1] == 3
    for tensor, name in ((held["a"][0], r"b\['a'\]\[0\]"), (held["w"].qweight, r"b\['w'\]\.qweight")):
        own = Guards()
        again = own.around("b", held)
        found = again["a"][0] if tensor is held["a"][0] else again["w"].qweight
        torch.as_strided(found, (1,), (1,), found.storage_offset() - 1).fill_(0)
        with pytest.raises(AssertionError, match=f"wrote before {name}: 4 bytes differ, .* at byte -4"):
            own.assert_whole()


def test_what_lies_around_a_guarded_tensor_is_no_number() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = Guards().around("x", torch.ones(3, dtype=dtype))
        beside = torch.as_strided(x, (5,), (1,), x.storage_offset() - 1)
        assert beside.isnan().tolist() == [True, False, False, False, True]


def test_numbers_of_tokens_around_borders() -> None:
    assert around_borders(8, 32) == (7, 8, 9, 31, 32, 33)
    assert around_borders(1, most=1) == (1,)
    assert {1, 2, 8, 16, 17, 24, 25, 32, 33, 64, 128, 256, 257} <= set(around_borders())


@pytest.mark.parametrize("zeros", [StoredMinusOnePerField(), StoredMinusOneUnmasked()])
def test_a_kernel_that_wraps_zero_points_otherwise_is_told_its_convention(zeros: ZeroPoints) -> None:
    weight = layer_of(Traits("gptq", 4, 128, zeros="wrapping", symmetric=False), 64, 512).weight()
    other = replace(weight, config=replace(weight.config, zeros=zeros))

    with pytest.raises(
        AssertionError, match=f"zero points of 0 are read as {zeros.name}, and this weight has them"
    ):
        assert_reads_back(kernel_of(other), weight, HALF)
    alike = weight_of()  # without zero points of 0 all conventions are one
    assert_reads_back(
        kernel_of(replace(alike, config=replace(alike.config, zeros=zeros))),
        alike,
        HALF,
    )


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_guarded_tensors_of_a_named_tuple_keep_their_names() -> None:
    found = Guards().around("x", Pair(torch.ones(2), torch.zeros(3)))

    assert type(found) is Pair
    assert torch.equal(found.first, torch.ones(2))
    assert torch.equal(found.second, torch.zeros(3))
