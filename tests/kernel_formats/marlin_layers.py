"""GPTQ layers for Marlin's order, and the checks of a repacked one."""

from typing import Any

import torch

from qload.formats import GPTQConfig, GPTQWeight
from qload.kernel_formats import repack, restore
from qload.layouts import STORED_MINUS_ONE, gptq
from qload.loader import ConfiguredFormat, FormatLoader
from qload.parallel import Rank
from qload.storage import MemoryStorage
from qload.testing import assert_same_bits, emulators
from qload.weights import Weights


def layer(
    K: int, N: int, group: int, *, bits: int = 4, act: bool = False, sym: bool = True,
    scales: torch.dtype = torch.float16, index: torch.dtype = torch.int32,
) -> GPTQWeight:  # fmt: skip
    """Build a layer of random codes, counting scales, and counting or symmetric zero points."""
    noise = torch.Generator().manual_seed(K * N + bits)
    size, groups = (K, 1) if group == -1 else (group, -(-K // group))
    g_idx = torch.arange(K) // size
    count = torch.arange(groups * N).reshape(groups, N)
    zeros = torch.full_like(count, 2 ** (bits - 1)) if sym else count % 2**bits
    return GPTQWeight(
        config=GPTQConfig(bits, group, STORED_MINUS_ONE, positional=groups > 1 and not act),
        qweight=gptq.rows(bits).pack(torch.randint(0, 2**bits, (K, N), generator=noise)),
        qzeros=STORED_MINUS_ONE.write(zeros.int(), gptq.columns(bits)),
        scales=(count % 32 + 1).to(scales),
        g_idx=(g_idx[torch.randperm(K, generator=noise)] if act else g_idx).to(index),
    )


def row_share(weight: GPTQWeight, rank: int, world: int) -> Any:
    tensors = {f"a.{name}": tensor for name, tensor in weight.fields().items()}
    loader = FormatLoader(
        ConfiguredFormat(GPTQWeight, GPTQConfig(weight.config.bits, weight.config.group_size))
    )
    return Weights(MemoryStorage(tensors), loader=loader, process_group=Rank(rank, world)).get_weights_row(
        "a"
    )


def assert_exact(weight: Any) -> Any:
    """Repack for Marlin; check the values, the emulated kernel, and the exact restore."""
    packed: Any = repack(weight, "marlin")
    read = emulators.marlin_weight(
        **packed.fields(), bits=packed.config.bits, is_k_full=packed.config.is_k_full
    )
    N, K = weight.shape
    assert_same_bits(packed.dequantize(), weight.dequantize())
    assert torch.equal(read[:K, :N], weight.dequantize().T)
    assert not read[K:].any()
    assert not read[:, N:].any()
    restored = restore(packed)
    assert (type(restored), restored.config) == (type(weight), weight.config)
    for name, tensor in weight.fields().items():
        assert_same_bits(restored.fields()[name], tensor)
    return packed
