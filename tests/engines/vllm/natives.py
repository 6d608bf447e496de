"""vLLM's native operators of a CPU that `LLM.generate` calls, in torch: pages of keys and values, attention.

    natives.put_in()

puts them where vLLM looks for its own, which its wheel without shared libraries has not.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def keep(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *_: Any, **__: Any) -> None:
    """Put keys and values (T, heads, size) into the pages (pages, heads, page, size), at the slot of each."""
    page = keys.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:  # of a token that is there
            keys[slot // page, :, slot % page] = key[token]
            values[slot // page, :, slot % page] = value[token]


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    sliding_window: int,
    block_table: Tensor,
    **_: Any,
) -> None:
    """Attention of each sequence's last queries (T, heads, size) over all of its pages, into `output`."""
    assert causal
    assert sliding_window == -1
    starts = query_start_loc.tolist()
    for number, length in enumerate(seq_lens.tolist()):
        q = query[starts[number] : starts[number + 1]].transpose(0, 1)
        held = (
            pages[block_table[number]].transpose(0, 1).flatten(1, 2)[:, :length]
            for pages in (key_cache, value_cache)
        )
        seen = torch.ones(q.shape[1], length, dtype=torch.bool).tril(length - q.shape[1])
        made = scaled_dot_product_attention(q, *held, attn_mask=seen, scale=scale, enable_gqa=True)
        output[starts[number] : starts[number + 1]] = made.transpose(0, 1).reshape(-1, *output.shape[1:])


def place(starts: Tensor, positions: Tensor, pages: Tensor, slots: Tensor, page: int) -> None:
    """The slot of each token: `pages` (sequences, pages of each), `positions` (T,) in its sequence."""
    for number, (first, last) in enumerate(itertools.pairwise(starts.tolist())):
        own = positions[first:last]
        slots[first:last] = pages[number, own // page].long() * page + own % page


def put_in() -> None:
    """In lieu of vLLM's own."""
    from vllm import _custom_ops as ops

    ops.cpu_attn_reshape_and_cache = keep
    ops.cpu_attention_with_kv_cache = attend
    ops.cpu_attn_get_scheduler_metadata = lambda **asked: torch.empty(0)
    own: Any = torch.ops._C
    own.init_cpu_memory_env = lambda nodes: None
    own.compute_slot_mapping_kernel_impl = place
    own.greedy_argmax = lambda logits: logits.argmax(-1)
    own.fused_gumbel_argmax = lambda logits, seeds: logits.argmax(-1)  # of a warm-up; nothing else samples
