"""How the linear layers of published models are cut, by the last part of their names."""

import re

from qload.loader import Heads, Split
from qload.models.stored_layers import SharedMatrix

COLUMN = re.compile(
    r"(q|k|v|qkv|gate|up|gate_up|q_b|kv_b)_proj|w1|w3|fc1|query_key_value|dense_h_to_4h|c_fc|lm_head"
)
ROW = re.compile(r"(o|out|down)_proj|w2|fc2|dense|dense_4h_to_h|c_proj")


def usual_split(prefix: str) -> Split | None:
    """Along what the layer under `prefix` is usually cut; None: no usual name, or every rank has all."""
    name = prefix.rpartition(".")[2]
    return "N" if COLUMN.fullmatch(name) else "K" if ROW.fullmatch(name) else None


def usual_matrix(prefix: str, heads: Heads | None) -> SharedMatrix:
    """How ranks usually share the layer under `prefix`, whose outputs are `heads`; None: they are none."""
    return SharedMatrix(prefix, "N" if heads is not None else usual_split(prefix), heads)
