"""Readers of a checkpoint in other processes, as in engines with a process for each rank."""

import pickle
from pathlib import Path

import pytest

from qload import loader_from_config, open_checkpoint
from qload.loader import ModuleLoader
from tests.paths import FIXTURES, cases

pytestmark = pytest.mark.usefixtures("seen_texts")

MODELS = sorted(each.parent for each in (FIXTURES / "models").glob("*/config.json"))
LAYERED = {
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "a.mlp.up_proj": {"quant_algo": "FP8"},
            "a.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        },
    },
    "auto-round": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "extra_config": {".*up_proj": {"bits": 8}, "a.mlp.down_proj": {"bits": 16}},
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*up_proj$"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
            }
        },
        "ignore": ["lm_head", "re:.*gate$"],
    },
}
NAMES = ("a.mlp.up_proj", "a.mlp.down_proj", "a.mlp.experts.3.up_proj", "a.mlp.gate", "lm_head")


@pytest.mark.parametrize(
    "folder", [*MODELS, *cases("modelopt", "auto_round", "awq")], ids=lambda path: path.name
)
def test_the_loader_of_a_checkpoint_is_pickled(folder: Path) -> None:
    loader = open_checkpoint(folder).loader

    assert repr(pickle.loads(pickle.dumps(loader))) == repr(loader)


@pytest.mark.parametrize("method", LAYERED)
def test_a_pickled_loader_chooses_alike_for_every_layer(method: str) -> None:
    loader = loader_from_config(LAYERED[method])
    assert isinstance(loader, ModuleLoader)

    twin = pickle.loads(pickle.dumps(loader))

    assert said(twin) == said(loader)
    assert len({*said(loader)}) > 1


def said(loader: ModuleLoader) -> list[tuple[str, str]]:
    """Return the format of each layer, or the reason of its exclusion."""
    return [(repr(loader.chosen(name)), repr(loader.left_out(name))) for name in NAMES]
