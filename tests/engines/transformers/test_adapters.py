"""Adapters of peft beside layers of qload: kept, loaded again, and refused where they ask for a weight.

Collected where transformers is installed.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

from qload.engines.transformers import lora_config, saved_lora_config
from qload.errors import ArgumentError
from tests.engines.transformers.models import shared

NAMES = ["q_proj", "down_proj"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:Unsupported layer type"),  # which peft says of every custom module
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


def test_an_adapter_that_was_saved_is_loaded_again(tmp_path: Path) -> None:
    stored, ids = shared("llama", "gptq"), torch.tensor([[3, 1, 4]])
    adapted = get_peft_model(stored.load(), lora_config(r=4, target_modules=NAMES, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)

    again = PeftModel.from_pretrained(stored.load(), tmp_path, config=saved_lora_config(tmp_path))

    with torch.no_grad():
        want = adapted.eval()(ids).logits
        assert torch.equal(again.eval()(ids).logits, want)
        assert not torch.equal(stored.load()(ids).logits, want)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"use_dora": True}, "use_dora\n  expected False: it reads weights"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights\n  expected one of True, False, 'gaussian'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"target_modules": "all-linear"}, "target_modules\n  expected names of layers"),
    ],
)
def test_what_needs_the_numbers_of_a_weight_is_refused(
    said: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=match):
        lora_config(**{"target_modules": NAMES, **said})


def test_an_adapter_that_was_saved_with_what_is_refused_is_refused_too(tmp_path: Path) -> None:
    config = lora_config(target_modules=NAMES)
    config.use_dora = True
    config.save_pretrained(tmp_path)

    with pytest.raises(ArgumentError, match="use_dora"):
        saved_lora_config(tmp_path)


@pytest.mark.parametrize("way", [True, False, "gaussian", "orthogonal"])
def test_ways_to_fill_an_adapter_that_read_no_weight_are_taken(way: Any) -> None:
    stored, ids = shared("llama", "gptq"), torch.tensor([[3, 1, 4]])

    adapted = get_peft_model(stored.load(), lora_config(r=4, target_modules=NAMES, init_lora_weights=way))

    assert bool(adapted(ids).logits.isfinite().all())
