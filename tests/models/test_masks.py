"""What tokens see, against the sentence that says it, and which layers have windows or chunks."""

from typing import Any

import pytest
import torch

from qload.errors import ConfigError
from qload.models import text_config
from qload.models.attention import visible_keys
from qload.models.config import Mask

pytestmark = pytest.mark.usefixtures("seen_texts")

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 4, "num_key_value_heads": 2}


def masks(kind: str, **said: Any) -> tuple[Mask, ...]:
    return text_config({"model_type": kind, **SIZES, **said}).masks


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_token_sees_what_the_sentence_says(window: int | None, chunk: int | None) -> None:
    got = visible_keys(torch.tensor([[0, 5], [9, 3]]), 8, window, chunk)

    want = [
        [
            [j <= i and (not window or j > i - window) and (not chunk or i // chunk == j // chunk)
             for j in range(8)]
            for i in row
        ]
        for row in ([0, 5], [9, 3])
    ]  # fmt: skip
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("kind", "said", "windows"),
    [
        ("llama", {"sliding_window": 3}, [None] * 4),
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mixtral", {}, [None] * 4),
        ("mixtral", {"sliding_window": 5}, [5] * 4),
        ("qwen2", {"sliding_window": 5}, [None] * 4),
        (
            "qwen2",
            {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
            [None] * 3 + [5],
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] + ["full_attention"] * 3},
            [4096] + [None] * 3,
        ),
        ("qwen3_moe", {"sliding_window": 5}, [None] * 4),
        ("qwen3_moe", {"sliding_window": 5, "use_sliding_window": True}, [5] * 4),
        ("gpt_oss", {"sliding_window": 6}, [6, None, 6, None]),
        ("gpt_oss", {}, [128, None, 128, None]),
    ],
)
def test_layers_have_the_windows_of_their_type(kind: str, said: Any, windows: list[int | None]) -> None:
    assert [mask.window for mask in masks(kind, **said)] == windows


def test_llama_4_has_chunks_where_it_has_rope_and_no_rope_on_every_fourth_layer() -> None:
    assert [(mask.chunk, mask.rotary) for mask in masks("llama4_text")] == [(8192, True)] * 3 + [
        (None, False)
    ]
    said = masks("llama4_text", no_rope_layers=[0, 1, 1, 0], attention_chunk_size=7)
    assert [(mask.chunk, mask.rotary) for mask in said] == [
        (None, False),
        (7, True),
        (7, True),
        (None, False),
    ]
    apart = masks("llama4_text", no_rope_layers=[1] * 4, layer_types=["full_attention"] * 4)
    assert [(mask.chunk, mask.rotary) for mask in apart] == [(None, True)] * 4


@pytest.mark.parametrize(
    ("kind", "said", "key"),
    [
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("llama4_text", {"no_rope_layers": [2] * 4}, "no_rope_layers"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
    ],
)
def test_what_does_not_say_it_of_every_layer_is_refused_by_key(kind: str, said: Any, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        masks(kind, **said)
    assert refusal.value.key == key
