"""What configs say of latent attention."""

import pytest

from qload.errors import ArgumentError, ConfigError
from qload.models.config import LatentConfig, latent_config

pytestmark = pytest.mark.usefixtures("seen_texts")

SMALL = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
}


def test_trap_61_sizes_come_from_the_keys_that_configs_have() -> None:
    said = latent_config({"model_type": "deepseek_v2", **SMALL, "head_dim": 16, "qk_nope_dim": 7})

    assert said == LatentConfig(48, 32, 24, 16, 40)
    assert said.key_size == 24 + 16


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_defaults_are_those_of_the_published_models(kind: str) -> None:
    said = latent_config({"model_type": kind})

    assert said == LatentConfig(1536, 512, 128, 64, 128)
    assert said.key_size == 192


def test_queries_that_are_not_compressed() -> None:
    said = latent_config({"model_type": "deepseek_v2", **SMALL, "q_lora_rank": None})

    assert said is not None
    assert said.q_rank is None


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("deepseek_v3", {}, True),
        ("deepseek_v3", {"rope_interleave": True}, True),
        ("deepseek_v3", {"rope_interleave": False}, False),
        ("deepseek_v2", {"rope_interleave": False}, True),  # which V2 does not read
    ],
)
def test_which_elements_are_rotated_together(kind: str, said: dict[str, object], expected: bool) -> None:
    config = latent_config({"model_type": kind, **SMALL, **said})

    assert config is not None
    assert config.interleaved is expected


def test_other_models_have_none() -> None:
    assert latent_config({"model_type": "llama", **SMALL}) is None
    assert latent_config({"model_type": "unheard of"}) is None


def test_the_text_model_within_another() -> None:
    said = latent_config({"model_type": "kimi", "text_config": {"model_type": "deepseek_v3", **SMALL}})

    assert said == LatentConfig(48, 32, 24, 16, 40)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_lora_rank", 0),
        ("kv_lora_rank", "512"),
        ("kv_lora_rank", None),
        ("qk_nope_head_dim", -1),
        ("qk_nope_head_dim", True),
        ("qk_rope_head_dim", 15),
        ("v_head_dim", 1 << 70),
        ("q_lora_rank", 0),
        ("q_lora_rank", [48]),
        ("rope_interleave", "yes"),
    ],
)
def test_values_that_are_no_sizes_are_refused_by_their_key(key: str, value: object) -> None:
    config = {"model_type": "deepseek_v3", **SMALL, key: value}

    with pytest.raises(ConfigError, match=key):
        latent_config(config)
    with pytest.raises(ConfigError, match=f"text_config.{key}"):
        latent_config({"text_config": config})


@pytest.mark.parametrize(
    "sizes", [(0, 32, 24, 16, 40), (48, 0, 24, 16, 40), (None, 32, 24, 15, 40), (None, 32, 24, 16, -1)]
)
def test_sizes_that_no_model_has_are_refused(sizes: tuple[int | None, int, int, int, int]) -> None:
    with pytest.raises(ArgumentError):
        LatentConfig(*sizes)
