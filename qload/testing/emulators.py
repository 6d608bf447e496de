"""Emulators of GPU kernels: buffers of each kernel layout, read on the CPU in the order of a kernel's lanes.

A second implementation of the layouts, from the address of each element. It imports torch alone and shares no
code with qload, so that a mistake in qload's own layouts is not repeated. K is the number of inputs, N of
outputs, G of groups; weights are (K, N), with rows in the order of inputs.
"""

import torch
from torch import Tensor

_WORD = 32
# The element in each field of a word, lowest first: even ones fill the low half, and one mask yields a pair.
_INTERLEAVE = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_SINGLE_OFFSETS = (0, 1, 8, 9, 16, 17, 24, 25)
_SPARSE_OFFSETS = (0, 4, 1, 5, 2, 6, 3, 7)
# Factors of vLLM for FP8 scales: its kernel widens e4m3 bits without correcting their exponent.
_FP8_RAISED = {torch.float16: 2.0**8, torch.bfloat16: 2.0**120}
# Shifts of the two exponent bits and the mantissa bit of an e2m1 code in a half of a register.
_FP4_SHIFT = {torch.float16: 9, torch.bfloat16: 6}


def marlin_codes(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned codes (K, N) of Marlin words (K/16, N*bits/2), for 4 or 8 bits."""
    k_size, n_size = 16 * words.shape[0], words.shape[1] * 2 // bits
    sizes = (k_size // 16, n_size // 64, 32, 4, bits // 4)
    k_tile, n_block, lane, j, word, field = _axes(*sizes, _WORD // bits)
    element = 4 * word + torch.tensor(_INTERLEAVE[bits])[field]
    n = 64 * n_block + 16 * j + lane // 4 + 8 * (element // 4)
    return _scatter(
        _split_words(words.reshape(sizes), bits), _lane_row(k_tile, lane, element), n, k_size, n_size
    )


def marlin_scales(stored: Tensor, grouped: bool | None = None) -> Tensor:
    """Return Marlin scales (G, N) in column order; `grouped` overrides the order that follows from G."""
    position = torch.arange(stored.shape[1])
    if stored.shape[0] > 1 if grouped is None else grouped:
        column = position // 64 * 64 + position % 64 // 8 + 8 * (position % 8)
    else:
        offset = torch.tensor(_SINGLE_OFFSETS)[position % 8]
        column = position // 32 * 32 + 2 * (position % 32 // 8) + offset
    return _place_columns(stored, column)


def marlin_zeros(words: Tensor, bits: int) -> Tensor:
    """Return Marlin zero points (G, N) from words (G, N*bits/32); their order does not depend on G."""
    n_size = words.shape[1] * _WORD // bits
    per_block = 2 * bits  # words of one block of 64 columns
    sizes = (words.shape[0], n_size // 64, per_block)
    group, n_block, word, field = _axes(*sizes, _WORD // bits)
    position = word * (_WORD // bits) + torch.tensor(_INTERLEAVE[bits])[field]
    n = 64 * n_block + position // 8 + 8 * (position % 8)
    return _scatter(_split_words(words.reshape(sizes), bits), group, n, words.shape[0], n_size)


def marlin_weight(
    qweight: Tensor,
    scales: Tensor,
    *,
    bits: int,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    perm: Tensor | None = None,
    is_k_full: bool = True,
    grouped: bool | None = None,
) -> Tensor:
    """Return the float32 weight (K, N) of Marlin buffers.

    Stored row i is input perm[i]. `g_idx` is the group of each stored row, read only when not `is_k_full`:
    this rank then holds part of K, and its groups are no equal runs. Empty `g_idx` and `perm` mean None.
    """
    codes = marlin_codes(qweight, bits)
    given = None if is_k_full else _index_or_none(g_idx)
    group = _even_groups(codes.shape[0], scales.shape[0]) if given is None else given
    values = codes - (2 ** (bits - 1) if qzeros is None else marlin_zeros(qzeros, bits)[group])
    weight = values.float() * marlin_scales(scales, grouped).float()[group]
    return _place_rows(weight, perm)


def panels_weight(
    qweight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    perm: Tensor | None = None,
    offsets: Tensor | None = None,
    *,
    bits: int,
    group_size: int,
    K: int,
    zero: int | None = None,
    of_codes: bool = False,
) -> Tensor:
    """Return the float32 weight (K, N) of panels (N/16, ...), columns of padding included.

    A group of `group_size` inputs, all `K` where it is -1, starts at a word of its own. Stored row i is input
    perm[i]. `zeros` are bytes where scales have numbers; without them all are `zero`, by default
    2**(bits - 1). `offsets` are subtracted last, or `of_codes` before the product with the scale.
    """
    per_word, size = _WORD // bits, K if group_size == -1 else group_size
    lines = -(-size // per_word)  # of 16 words, to a group
    k, n = _axes(K, 16 * qweight.shape[0])
    panel, lane, group, row = n // 16, n % 16, k // size, k % size
    words = qweight[panel, 16 * (group * lines + row // per_word) + lane]
    codes = words.long() >> bits * (row % per_word) & (2**bits - 1)
    at = 16 * group + lane
    default = 2 ** (bits - 1) if zero is None else zero
    values = (codes - (default if zeros is None else zeros[panel, at].long())).float()
    offset = torch.zeros(()) if offsets is None else offsets[panel, at].float()
    if of_codes:
        return _place_rows((values - offset) * scales[panel, at].float(), perm)
    return _place_rows(values * scales[panel, at].float() - offset, perm)


def fp8_marlin_weight(qweight: Tensor, scales: Tensor, *, exponent_bias: bool) -> Tensor:
    """Return the float32 weight (K, N) of e4m3 bytes in the 8-bit Marlin order.

    `exponent_bias`: the stored scales carry the factor that vLLM folds into them (TGI folds none).
    """
    values = marlin_codes(qweight, 8).to(torch.uint8).view(torch.float8_e4m3fn).double()
    factors = marlin_scales(scales).double()
    if exponent_bias:
        factors = factors / _FP8_RAISED[scales.dtype]
    return (values * factors[_even_groups(values.shape[0], scales.shape[0])]).float()


def marlin_byte_scales(stored: Tensor, *, paired: bool = True) -> Tensor:
    """Return Marlin scales of one byte, uint8 (G, N), in column order.

    `paired`: two groups share each run of 128 bytes (vLLM 0.11), or each group has runs of 64 (vLLM 0.33).
    """
    groups, n_size = stored.shape
    width = 2 if paired else 1  # groups of a run
    line, at = _axes(groups // width, width * n_size)
    place = at % 8
    swapped = 4 * (place // 4) + torch.tensor((0, 2, 1, 3))[place % 4]
    column = at // (64 * width) * 64 + at % (64 * width) // (8 * width) + 8 * swapped
    flat = stored.contiguous().view(torch.uint8).reshape(-1, width * n_size)
    return _scatter(flat.long(), width * line + at // 8 % width, column, groups, n_size).to(torch.uint8)


def fp4_marlin_weight(qweight: Tensor, scales: Tensor, global_scale: Tensor | None = None) -> Tensor:
    """Return the float32 weight (K, N) of e2m1 codes as registers of vLLM 0.11's Marlin kernel hold it.

    With a `global_scale`, whose dtype is that of the activations, scales are s0e5m3 (NVFP4) and a code is
    only shifted into place; without one they are exponents, read with bfloat16 (MXFP4). ValueError for a
    global scale of another dtype.
    """
    dtype = torch.bfloat16 if global_scale is None else global_scale.dtype
    if dtype not in _FP4_SHIFT:
        raise ValueError(f"vLLM 0.11's kernel takes a global scale of the activations' dtype, got {dtype}")
    return _fp4_weight(qweight, marlin_byte_scales(scales), global_scale, dtype)


def fp4_marlin_vllm_0_33_weight(
    qweight: Tensor, scales: Tensor, global_scale: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """Return the float32 weight (K, N) of e2m1 codes as registers of vLLM 0.33's Marlin kernel hold it.

    `dtype`: of the activations; MXFP4, without a `global_scale`, is read with bfloat16 alone. ValueError for
    a global scale that is not float32, and for MXFP4 with float16.
    """
    if global_scale is None and dtype != torch.bfloat16:
        raise ValueError(f"vLLM 0.33's kernel reads MXFP4 with bfloat16, got {dtype}")
    if global_scale is not None and global_scale.dtype != torch.float32:
        raise ValueError(f"vLLM 0.33's kernel takes a global scale in float32, got {global_scale.dtype}")
    return _fp4_weight(qweight, marlin_byte_scales(scales, paired=False), global_scale, dtype)


def marlin_24_codes(B_24: Tensor, bits: int) -> Tensor:
    """Return the kept codes (K/2, N) of 2:4 words (K/32, N*bits/2)."""
    kept_size, n_size = 16 * B_24.shape[0], B_24.shape[1] * 2 // bits
    sizes = (kept_size // 16, n_size // 64, 32, 4, bits // 4)
    k_tile, n_block, lane, j, word, field = _axes(*sizes, _WORD // bits)
    element = 4 * word + torch.tensor(_INTERLEAVE[bits])[field]
    n = 64 * n_block + 16 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * (element // 4) + j
    return _scatter(
        _split_words(B_24.reshape(sizes), bits), _lane_row(k_tile, lane, element), n, kept_size, n_size
    )


def marlin_24_positions(B_meta: Tensor, N: int) -> Tensor:
    """Return the position of each kept value in its four inputs, int64 (K/4, 2, N), from flat metadata."""
    flat = B_meta.reshape(-1).long()
    n, column, quad, half = _axes(N, flat.numel() // N, 4, 2)  # a column is 16 inputs, hence 4 quads
    row = n // 64 * 64 + n % 2 * 2 + n % 8 // 4 + n % 4 // 2 * 32 + n % 64 // 8 * 4
    # In each 2x2 square of int16 the two off the diagonal change places.
    shift = row % 2 - column % 2
    row, column = row - shift, column + shift
    address = column // 2 * 2 * N + row * 2 + column % 2
    return (flat[address] >> (4 * quad + 2 * half) & 3).permute(1, 2, 3, 0).reshape(-1, 2, N)


def marlin_24_scales(stored: Tensor, grouped: bool | None = None) -> Tensor:
    """Return 2:4 scales (G, N) in column order; `grouped` overrides the order that follows from G."""
    if not (stored.shape[0] > 1 if grouped is None else grouped):
        return stored.clone()
    position = torch.arange(stored.shape[1])
    return _place_columns(stored, position // 8 * 8 + torch.tensor(_SPARSE_OFFSETS)[position % 8])


def marlin_24_weight(
    B_24: Tensor, B_meta: Tensor, s: Tensor, *, bits: int, grouped: bool | None = None
) -> Tensor:
    """Return the dense float32 weight (K, N) of 2:4 buffers; dropped positions are zero."""
    values = marlin_24_codes(B_24, bits) - 2 ** (bits - 1)
    kept_size, n_size = values.shape
    group = _even_groups(2 * kept_size, s.shape[0])[2 * torch.arange(kept_size)]
    kept = (values.float() * marlin_24_scales(s, grouped).float()[group]).reshape(-1, 2, n_size)
    quads = torch.zeros(kept_size // 2, 4, n_size)
    return quads.scatter_(1, marlin_24_positions(B_meta, n_size), kept).reshape(-1, n_size)


def exllama_codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes (K, N), in stored row order, of shuffled ExLlama words (K*bits/32, N)."""
    code, bit = _axes(words.shape[0] * _WORD // bits, bits)
    if bits == 3:
        # A word holds ten codes, five a half; the top bit of each half is one bit of code 30 or 31 of 32.
        place, spilled = code % 32, code % 32 >= 30
        word = code // 32 * 3 + torch.where(spilled, bit, place // 10)
        shift = 16 * (code % 2) + torch.where(spilled, 15, 3 * (place % 10 // 2) + bit)
    else:
        per_word = _WORD // bits
        place = code % per_word
        field = place if bits == 8 else place // 2 + per_word // 2 * (place % 2)
        word, shift = code // per_word, bits * field + bit
    return _join_bits(words.long()[word] >> shift[..., None], bit)


def exllama_weight(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    *,
    bits: int,
    g_idx: Tensor,
    q_perm: Tensor | None = None,
    zero_offset: int = 1,
    mask: bool = False,
) -> Tensor:
    """Return the float32 weight (K, N) of ExLlama buffers.

    `g_idx` is the group of each stored row, and stored row i is input q_perm[i]. A zero point is the stored
    one plus `zero_offset`, wrapped to its bits only when `mask` is set: the kernels leave it whole.
    """
    zeros = _read_stream(qzeros, bits)[:, : qweight.shape[1]] + zero_offset
    zeros = zeros & (2**bits - 1) if mask else zeros
    group = g_idx.long()
    weight = (exllama_codes(qweight, bits) - zeros[group]).float() * scales.float()[group]
    return _place_rows(weight, q_perm)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return x (M, K) times weight (K, N): products and sums in float32, rounded once to x's dtype."""
    return (x.float() @ weight.float()).to(x.dtype)


def _fp4_weight(qweight: Tensor, scales: Tensor, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Codes as 16-bit floats times scales (G, N), bytes in column order."""
    codes, bytes_ = marlin_codes(qweight, 4), scales.long()
    bits = (codes >> 3) << 15 | (codes & 7) << _FP4_SHIFT[dtype]
    values = _decode_halves(bits, dtype)
    if global_scale is None:
        values, halves = values * 2.0**126, bytes_ << 7
    elif dtype == torch.float16:
        halves = bytes_ << 7
    else:  # the highest bit becomes the highest of eight bits of exponent, the others the lowest four
        halves = (bytes_ & 0x80) << 7 | (bytes_ & 0x7F) << 4
    factors = _decode_halves(halves, dtype) * (1.0 if global_scale is None else global_scale.double())
    return (values * factors[_even_groups(values.shape[0], scales.shape[0])]).float()


def _axes(*sizes: int) -> list[Tensor]:
    """One index per axis, each shaped to broadcast against the others."""
    rank = len(sizes)
    return [
        torch.arange(size).reshape([-1 if at == axis else 1 for at in range(rank)])
        for axis, size in enumerate(sizes)
    ]


def _decode_halves(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of 16-bit patterns in a dtype, float64."""
    return bits.to(torch.uint16).view(dtype).double()


def _split_words(words: Tensor, bits: int) -> Tensor:
    """Each word's fields, lowest first, on a new last axis."""
    shifted = torch.bitwise_right_shift(words.long()[..., None], torch.arange(0, _WORD, bits))
    return shifted.bitwise_and(2**bits - 1)


def _read_stream(words: Tensor, bits: int) -> Tensor:
    """The codes of a little-endian bit stream along each row; a code may straddle two words."""
    code, bit = _axes(words.shape[1] * _WORD // bits, bits)
    at = code * bits + bit
    return _join_bits((words.long()[:, at // _WORD] >> (at % _WORD)).movedim(0, -1), bit).T


def _join_bits(at_bit: Tensor, bit: Tensor) -> Tensor:
    """Codes (K, N) from words (K, bits, N), shifted so that bit `bit` of a code is the lowest bit."""
    return torch.sum((at_bit & 1) << bit[..., None], dim=1)


def _lane_row(k_tile: Tensor, lane: Tensor, element: Tensor) -> Tensor:
    """The row of a lane's element in an mma fragment: a pair, and the pair eight rows below."""
    row = element % 4
    return 16 * k_tile + 2 * (lane % 4) + row % 2 + 8 * (row // 2)


def _scatter(values: Tensor, row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
    """Values at their (row, column); -1 marks an address without a lane."""
    out = torch.full((rows, columns), -1)
    out[row, column] = values
    return out


def _place_columns(stored: Tensor, column: Tensor) -> Tensor:
    """Stored columns in the order of outputs."""
    out = torch.empty_like(stored)
    out[:, column] = stored
    return out


def _place_rows(stored: Tensor, perm: Tensor | None) -> Tensor:
    """Stored rows in the order of inputs."""
    row = _index_or_none(perm)
    if row is None:
        return stored
    out = torch.empty_like(stored)
    out[row] = stored
    return out


def _even_groups(k_size: int, groups: int) -> Tensor:
    """The group of each row when groups are equal runs of rows."""
    return torch.arange(k_size) // (k_size // groups)


def _index_or_none(index: Tensor | None) -> Tensor | None:
    """An index as int64; None for None and for the empty tensor, which kernels get for no index."""
    return None if index is None or index.numel() == 0 else index.long()
