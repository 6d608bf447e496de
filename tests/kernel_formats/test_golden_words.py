"""Tensors of one small weight in every layout of integers, pinned as text and bit for bit."""

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from torch import Tensor

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack
from qload.kernel_formats.repack import targets
from qload.layouts import Stored, gptq
from qload.spec import Weight

K, N, GROUP = 64, 64, 32
PAIRS = torch.tensor(
    [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1]]
).bool()
WORDS_PER_LINE = 16


def build_layer(bits: int, codes: Tensor, zeros: Tensor, g_idx: Tensor) -> GPTQWeight:
    """Build two groups with scales that count through the columns, in the second from 64 on."""
    return GPTQWeight(
        config=GPTQConfig(bits, GROUP, Stored(), positional=bool(g_idx[0] == 0)),
        qweight=gptq.rows(bits).pack(codes),
        qzeros=Stored().write(zeros, gptq.columns(bits)),
        scales=torch.arange(2 * N).reshape(2, N).half(),
        g_idx=g_idx.int(),
    )


def dense(bits: int, act: bool = False) -> GPTQWeight:
    """Build a layer of codes and zero points that count, modulo 2**bits; in act order group 1 comes first."""
    k, n = torch.arange(K)[:, None], torch.arange(N)
    zeros = (n + n // 16 + torch.tensor([[0], [3]])) % 2**bits
    groups = torch.arange(K) // GROUP
    codes = (k + k // 8 + 5 * n + n // 8) % 2**bits  # neighbours in every order differ
    return build_layer(bits, codes, zeros, 1 - groups if act else groups)


def sparse(bits: int) -> GPTQWeight:
    """Build a 2:4 sparse layer; the pair of kept rows rotates with columns and quads."""
    k, n = torch.arange(K)[:, None], torch.arange(N)
    kept = PAIRS[(n + n // 8 + 5 * (k // 4)) % 6, k % 4]
    middle = 2 ** (bits - 1)
    codes = torch.where(kept, (n + k) % (middle - 1), middle)
    return build_layer(bits, codes, torch.full((2, N), middle), torch.arange(K) // GROUP)


def format_row(row: Tensor) -> list[str]:
    """Format words in hexadecimal and scales as integers."""
    if row.dtype.is_floating_point:
        return [str(int(value)) for value in row.tolist()]
    digits = 2 * row.element_size()
    return [f"{word & (16**digits - 1):0{digits}x}" for word in row.tolist()]


def format_weight(weight: Weight) -> str:
    """Format the first row of each matrix, the beginning of its last row, and every index whole."""
    lines = []
    for name, tensor in weight.fields().items():
        lines.append(f"{name} {tuple(tensor.shape)}")
        if tensor.ndim == 1:
            lines.append("  " + " ".join(map(str, tensor.tolist())))
        else:
            first, last = format_row(tensor[0]), format_row(tensor[-1])
            runs = [first[at : at + WORDS_PER_LINE] for at in range(0, len(first), WORDS_PER_LINE)]
            lines += ["  " + " ".join(run) for run in [*runs, last[:WORDS_PER_LINE]]]
    return "\n".join(lines)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("layout", targets(GPTQWeight))
def test_the_words_of_every_layout_are_pinned(layout: str, bits: int, golden: SnapshotAssertion) -> None:
    weight = sparse(bits) if layout == "marlin_24" else dense(bits)

    assert format_weight(repack(weight, layout)) == golden


@pytest.mark.parametrize("layout", ["exllama", "marlin"])
def test_the_words_of_an_act_order_are_pinned(layout: str, golden: SnapshotAssertion) -> None:
    assert format_weight(repack(dense(4, act=True), layout)) == golden


@pytest.mark.parametrize("layout", targets(GPTQWeight))
def test_every_word_of_every_layout_is_pinned(layout: str, golden_tensors: SnapshotAssertion) -> None:
    weight = sparse(4) if layout == "marlin_24" else dense(4)

    assert repack(weight, layout).fields() == golden_tensors
