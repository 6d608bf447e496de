"""DeepSeek V2 and V3 against transformers' own, and where the owner's formula wins over transformers'."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qload import FakeWorld, MemoryStorage, Weights
from qload.detect import loader_from_config
from qload.models.attention import score_scale
from qload.models.config import text_config
from qload.models.decoder import load_model
from qload.models.rope import Rope, yarn_mscale
from qload.parallel import ProcessGroup
from tests.models.latent_formula import SMALL, YARN, drawn
from tests.models.recorded import logits
from tests.models.with_transformers.twins import assert_close, twin

V2 = {"model_type": "deepseek_v2"}
CONFIGS: dict[str, dict[str, Any]] = {
    "v2": V2,
    "v2 lite": {**V2, "q_lora_rank": None, "n_group": 1, "topk_group": 1},
    "v2 with groups": {**V2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "v2 without rope_scaling": {**V2, "rope_scaling": None},
    "v2 with a factor of 1": {**V2, "rope_scaling": {**YARN, "factor": 1.0}},
    "v3": {},
    "v3 not renormalized": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "v3 without rope_scaling": {"rope_scaling": None},
    "v3 turned in halves": {"rope_interleave": False},
    "v3 of dense layers": {"first_k_dense_replace": 2},
    "v3 of one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "v3 that is published so": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "v3 of values wider than keys": {"v_head_dim": 26},
    "v3 tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_are_those_of_transformers(name: str, seed: int, tmp_path: Path) -> None:
    config = {**SMALL, **CONFIGS[name]}
    tensors = drawn(config, seed)
    ids = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        want = twin(tmp_path, tensors, config)(ids).logits

    def work(group: ProcessGroup) -> torch.Tensor:
        weights = Weights(MemoryStorage(tensors), loader=loader_from_config(None), process_group=group)
        return logits(load_model(weights, config), ids, ranks=group.size(), chunks=3)

    for ranks in (1, 2, 4):
        made = FakeWorld(ranks).run(work)
        assert all(each.equal(made[0]) for each in made)
        assert_close(made[0], want)


YARNS = [
    {},
    {"beta_fast": 32, "beta_slow": 1},
    {"truncate": False},
    {"factor": 40.0, "original_max_position_embeddings": 4096},
    {"attention_factor": 1.5},
    {"mscale": None, "mscale_all_dim": None},
]


@pytest.mark.parametrize("said", YARNS, ids=str)
def test_frequencies_and_magnitudes_are_those_of_transformers(said: dict[str, Any]) -> None:
    yarn = {key: value for key, value in {**YARN, **said}.items() if value is not None}
    theirs = AutoConfig.for_model(**{**SMALL, "rope_scaling": yarn})
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))

    own = Rope(text_config({**SMALL, "rope_scaling": yarn}).rope)

    assert own.frequencies.equal(frequencies)
    assert own.scale == scale


# What a config says; the owner's `mscale` and `mscale_all_dim`, 1 and 0 where nothing is said; transformers
# counts a 0 as nothing, and takes yarn_mscale(factor) unless both are there.
DIFFERENT = [
    ({"mscale": 0.707, "mscale_all_dim": None}, 0.707, 0.0),
    ({"mscale": None, "mscale_all_dim": 0.707}, 1.0, 0.707),
    ({"mscale": 0.0, "mscale_all_dim": 1.0}, 0.0, 1.0),
    ({"mscale": 0.707, "mscale_all_dim": 0.0}, 0.707, 0.0),
]


@pytest.mark.parametrize(("said", "mscale", "mscale_all_dim"), DIFFERENT)
def test_where_transformers_differs_the_owners_formula_wins(
    said: dict[str, Any], mscale: float, mscale_all_dim: float
) -> None:
    yarn = {key: value for key, value in {**YARN, **said}.items() if value is not None}
    theirs = AutoConfig.for_model(**{**SMALL, "rope_scaling": yarn})
    _, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))

    own = Rope(text_config({**SMALL, "rope_scaling": yarn}).rope).scale

    assert scale == yarn_mscale(8.0)
    assert own == yarn_mscale(8.0, mscale) / yarn_mscale(8.0, mscale_all_dim)
    assert own != scale


def test_the_softmax_scale_is_that_of_transformers(tmp_path: Path) -> None:
    for number, said in enumerate(({}, {"mscale_all_dim": 0.0}, {"factor": 0.5})):
        config = {**SMALL, "rope_scaling": {**YARN, **said}}
        theirs = twin(tmp_path / str(number), drawn(config), config).model.layers[0].self_attn.scaling
        own = text_config(config)
        assert own.latent is not None
        assert score_scale(own.rope, own.latent.key_size) == theirs
