"""Configs of any contents: a text model, or an error of qload's that names a key; never anything else."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from qload.errors import ConfigError
from qload.models import FAMILIES, text_config
from qload.models.config import TextConfigFields
from tests.example_counts import at_most
from tests.models.drawn import config

NUMBERS = st.one_of(
    st.integers(-2, 70), st.sampled_from([1 << 62, 1 << 70, -(1 << 70), 0.5, 1e300, 1.0, True])
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=3))
TYPES = st.sampled_from(
    ["default", "linear", "llama3", "yarn", "dynamic", "full_attention", "sliding_attention"]
)
ROPES = st.dictionaries(
    st.sampled_from(
        ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "mscale",
         "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "full_attention"]
    ),
    TYPES | LEAVES,
    max_size=5,
)  # fmt: skip
VALUES = LEAVES | TYPES | ROPES | st.lists(LEAVES | TYPES, max_size=3)
KEYS = sorted(
    {key for kind in FAMILIES for key in config(kind)}
    | {*TextConfigFields.model_fields, "rope_scaling", "rope_theta", "swiglu_alpha", "swiglu_limit"}
)


@at_most(300)
@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_config_is_a_model_or_refused_by_a_key(kind: str, said: dict[str, Any]) -> None:
    try:
        made = text_config({**config(kind), **said})
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert (len(made.masks), made.heads % made.kv_heads, made.rope.dim % 2) == (made.layers, 0, 0)
    assert refusal or made
