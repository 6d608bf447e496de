"""What configs say of how a model sees."""

import copy

import pytest

from qload.errors import ConfigError
from qload.experts import GatedActivation
from qload.models.vision_config import ResamplerConfig, TowerConfig, VisionConfig, vision_config

pytestmark = pytest.mark.usefixtures("seen_texts")

SMALL = {
    "model_type": "idefics2",
    "image_token_id": 95,
    "vision_config": {"hidden_size": 32, "num_attention_heads": 4, "image_size": 30, "patch_size": 7},
    "perceiver_config": {"resampler_n_heads": 4, "num_key_value_heads": 2, "resampler_head_dim": 8},
}


def test_the_sizes_and_what_follows_from_them() -> None:
    said = vision_config(SMALL, 64, 1e-5)

    assert (said.tower.hidden, said.tower.heads, said.tower.side, said.image_token) == (32, 4, 4, 95)
    assert (said.resampler.hidden, said.resampler.kv_heads) == (64, 2)


# A key of the config, a value that is no default, and the field that has it.
SAID = [
    ("vision_config", "hidden_size", 40, "tower", "hidden", 40),
    ("vision_config", "intermediate_size", 56, "tower", "inner", 56),
    ("vision_config", "num_hidden_layers", 5, "tower", "layers", 5),
    ("vision_config", "num_attention_heads", 8, "tower", "heads", 8),
    ("vision_config", "num_channels", 4, "tower", "channels", 4),
    ("vision_config", "patch_size", 5, "tower", "patch", 5),
    ("vision_config", "patch_size", 30, "tower", "side", 1),
    ("vision_config", "image_size", 35, "tower", "side", 5),
    ("vision_config", "image_size", 34, "tower", "side", 4),
    ("vision_config", "image_size", 7, "tower", "side", 1),
    ("vision_config", "layer_norm_eps", 0.125, "tower", "eps", 0.125),
    ("vision_config", "hidden_act", "silu", "tower", "activation", GatedActivation("silu")),
    ("perceiver_config", "resampler_n_latents", 7, "resampler", "latents", 7),
    ("perceiver_config", "resampler_depth", 5, "resampler", "depth", 5),
    ("perceiver_config", "resampler_n_heads", 6, "resampler", "heads", 6),
    ("perceiver_config", "resampler_head_dim", 24, "resampler", "head_size", 24),
    ("perceiver_config", "num_key_value_heads", 1, "resampler", "kv_heads", 1),
    ("perceiver_config", "hidden_act", "gelu", "resampler", "activation", GatedActivation("gelu")),
]


@pytest.mark.parametrize(("section", "key", "value", "part", "field", "expected"), SAID)
def test_every_key_is_a_field_and_no_other_field_changes(
    section: str, key: str, value: object, part: str, field: str, expected: object
) -> None:
    other = vision_config({**SMALL, section: {**SMALL[section], key: value}}, 64, 1e-5)  # type: ignore[dict-item]
    usual = vision_config(SMALL, 64, 1e-5)

    changed = {
        (name, each)
        for name in ("tower", "resampler")
        for each in vars(getattr(usual, name))
        if getattr(getattr(other, name), each) != getattr(getattr(usual, name), each)
    }
    assert getattr(getattr(other, part), field) == expected
    assert changed <= {
        (part, field),
        *([("tower", "patch"), ("tower", "side")] if key == "patch_size" else []),
    }


def test_what_a_config_leaves_out_is_as_its_owner_has_it() -> None:
    """`Idefics2VisionConfig` and `Idefics2PerceiverConfig` of transformers 5.23.0."""
    tower = TowerConfig(768, 3072, 12, 12, 3, 32, 7, GatedActivation("gelu_tanh"), 1e-6)
    resampler = ResamplerConfig(4096, 64, 3, 16, 4, 96, GatedActivation("silu"), 1e-6)

    assert vision_config({"model_type": "idefics2"}, 4096, 1e-5) == VisionConfig(tower, resampler, 32001)


@pytest.mark.parametrize(
    ("own", "eps"),
    [({}, 1e-5), ({"hidden_size": 64}, 1e-6), ({"hidden_size": 64, "rms_norm_eps": 1e-3}, 1e-3)],
)
def test_a_resampler_of_another_length_has_the_texts(own: dict[str, object], eps: float) -> None:
    said = vision_config({**SMALL, "perceiver_config": own}, 64, 1e-5)

    assert (said.resampler.hidden, said.resampler.eps) == (64, eps)


def test_trap_64_the_config_stays_as_it_is() -> None:
    config = copy.deepcopy(SMALL)

    vision_config(config, 64, 1e-5)

    assert config == SMALL


def test_a_model_that_only_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="idefics2"):
        vision_config({"model_type": "mistral"}, 64, 1e-5)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vision_config", "num_attention_heads", 5),
        ("vision_config", "image_size", 6),
        ("vision_config", "image_size", [30, 30]),
        ("vision_config", "num_hidden_layers", 1 << 40),
        ("vision_config", "hidden_act", "relu6"),
        ("perceiver_config", "num_key_value_heads", 3),
        ("perceiver_config", "resampler_n_latents", 0),
        ("perceiver_config", "rms_norm_eps", float("nan")),
    ],
)
def test_what_cannot_be_acted_on_is_refused_by_its_key(section: str, key: str, value: object) -> None:
    config = {**SMALL, section: {**SMALL[section], key: value}}

    with pytest.raises(ConfigError, match=f"{section}.{key}"):
        vision_config(config, 64, 1e-5)


@pytest.mark.parametrize(("key", "value"), [("vision_config", [1]), ("image_token_id", -1)])
def test_what_is_no_section_and_no_id_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        vision_config({**SMALL, key: value}, 64, 1e-5)
