"""Damage that names, shapes and the config tell of: each kind once, for a model of any format.

A function changes the model in place, or raises DoesNotApplyError with the reason why it cannot.
"""

import json
from pathlib import Path

from qload import architecture_of
from tests.verify.damage.any_type import (
    Plant,
    embedding_lost,
    head_lost,
    hidden_edited,
    layer_lost,
    layers_left_out,
    vector_zero,
    vocabulary_short,
)
from tests.verify.damage.model import DoesNotApplyError, Model


def _known(model: Model) -> None:
    if architecture_of(model.config) is None:
        raise DoesNotApplyError("no table knows the type of the model")


def _without(model: Model, *ends: str) -> None:
    lost = [name for name in model.tensors if any(end in f".{name}" for end in ends)]
    if not lost:
        raise DoesNotApplyError(f"no {ends[0]}")
    for name in lost:
        del model.tensors[name]


def _text(model: Model) -> dict[str, object]:
    section = model.config.get("text_config", model.config)
    assert isinstance(section, dict)
    return section


def query_is_key(model: Model) -> None:
    """The tensors of k_proj under the name of q_proj."""
    _known(model)
    pairs = {name: name.replace(".q_proj", ".k_proj") for name in model.tensors if ".q_proj" in name}
    first = next(iter(pairs), "").partition(".q_proj")[0]
    mine = {name: other for name, other in pairs.items() if name.startswith(first)}
    if not mine or not all(other in model.tensors for other in mine.values()):
        raise DoesNotApplyError("no q_proj beside a k_proj of the same format")
    for name, other in mine.items():
        model.tensors[name] = model.tensors[other].clone()


def final_norm_lost(model: Model) -> None:
    _known(model)
    _without(model, ".model.norm.")


def queries_lost(model: Model) -> None:
    """q_proj of every layer."""
    _known(model)
    _without(model, ".q_proj.")


def layers_lost(model: Model) -> None:
    """Every layer."""
    _known(model)
    _without(model, ".layers.")


def heads_edited(model: Model) -> None:
    """Twice as many heads."""
    _known(model)
    text = _text(model)
    if not isinstance(text.get("head_dim"), int):
        raise DoesNotApplyError("heads are as wide as hidden_size and their number say")
    if not any(".q_proj" in name for name in model.tensors):
        raise DoesNotApplyError("no q_proj")
    text["num_attention_heads"] = 2 * int(str(text["num_attention_heads"]))


PLANTS: tuple[Plant, ...] = (
    query_is_key, vocabulary_short, head_lost, final_norm_lost, embedding_lost, queries_lost, layers_lost,
    layer_lost, heads_edited, hidden_edited, layers_left_out, vector_zero,
)  # fmt: skip


def old_index(folder: Path) -> None:
    """A shard and its index, of which `model.safetensors` beside them is a newer copy."""
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model-00001-of-00001.safetensors").write_bytes(whole)
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    names = {name: "model-00001-of-00001.safetensors" for name in header if name != "__metadata__"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
