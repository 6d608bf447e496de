"""A plan's yes and no are loading's: the same ranks, the same words, and as many bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qload import DefaultWeightsLoader, MemoryStorage, Weights, loader_from_config, open_checkpoint, plan
from qload.detect import read_model_config
from qload.errors import QloadError
from qload.models import FAMILIES, load_model
from qload.models.stored_layers import text_prefix_and_head
from qload.parallel import Rank
from qload.plan import Alternative, PlannedLayer, ShardingPlan
from tests.models.drawn import config, tensors, weights
from tests.paths import FIXTURES, FOLDERS, cases

MODELS = sorted((FIXTURES / "models").iterdir())
WORLDS = tuple(range(1, 9))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}


class Quiet(Rank):
    """A rank whose model is loaded, and never run."""

    def summed(self, values: Tensor) -> Tensor:
        raise AssertionError

    gathered = maximum = first = summed


def refusal(work: Any) -> str:
    """Why something cannot be done, in the words of whoever refuses it; "" where it can."""
    try:
        work()
    except QloadError as error:
        return str(error)
    return ""


def gptq(K: int, N: int, prefix: str = "down_proj", **config: Any) -> Weights:
    """One layer, all of it zero."""
    stored = {
        f"{prefix}.qweight": torch.zeros(K // 8, N, dtype=torch.int32),
        f"{prefix}.qzeros": torch.zeros(K // 64, N // 8, dtype=torch.int32),
        f"{prefix}.scales": torch.zeros(K // 64, N, dtype=torch.float16),
    }
    return Weights(MemoryStorage(stored), loader=loader_from_config({**GPTQ, **config}))


def fused(said: Any) -> dict[str, Tensor]:
    """A dense model whose queries, keys and values are one matrix, and gate and up another."""
    held = tensors(said)
    for parts, whole in (
        (["q_proj", "k_proj", "v_proj"], "qkv_proj"),
        (["gate_proj", "up_proj"], "gate_up_proj"),
    ):
        for name in [name for name in held if f".{parts[0]}." in name]:
            held[name.replace(parts[0], whole)] = torch.cat(
                [held.pop(name.replace(parts[0], part)) for part in parts]
            )
    return held


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_fits_where_it_loads_and_else_says_what_loading_says(kind: str, ranks: int) -> None:
    said = config(kind)
    stored = tensors(said)

    found = plan(weights(said, stored), tp=ranks).worlds[ranks]

    for place in {0, ranks - 1}:
        assert found.reason == refusal(
            lambda at=place: load_model(weights(said, stored, Quiet(at, ranks)), said)
        )
    assert found.fits == (not found.reason)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_a_model_of_another_tool_fits_where_it_loads(folder: Path, ranks: int) -> None:
    found = plan(folder, tp=ranks)

    for place in range(ranks):
        with open_checkpoint(folder, process_group=Quiet(place, ranks)) as held:
            told = refusal(lambda here=held: load_model(here, read_model_config(folder)))
        assert told == found.worlds[ranks].reason


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_model_stored_fused_fits_where_it_loads(ranks: int) -> None:
    said = config("qwen3")
    stored = fused(said)

    found = plan(weights(said, stored), tp=ranks).worlds[ranks]

    last = Quiet(ranks - 1, ranks)
    assert found.reason == refusal(lambda: load_model(weights(said, stored, last), said))
    assert found.fits == (ranks in (1, 2, 4))


def loaded_bytes(held: Weights, layer: PlannedLayer) -> int | None:
    """Of what a rank's load holds; None where the format makes tensors of its own while it loads."""
    if any(spec.spent or spec.view for spec in held.loader.describe(held, layer.prefix).specs):
        return None
    known = held.architecture
    if layer.cut == "N":
        weight = held.get_weights_col(layer.prefix, heads=known.heads(layer.prefix) if known else None)
    else:
        weight = (held.get_weights_row if layer.cut == "K" else held.get_weights)(layer.prefix)
    return sum(tensor.nbytes for tensor in weight.fields().values())


PLAIN_CUTS = [folder for folder in cases(*FOLDERS) if not folder.name.startswith("model_")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("folder", PLAIN_CUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_bytes_are_those_of_the_weights_that_ranks_load(folder: Path, ranks: int) -> None:
    found = plan(folder, tp=ranks)

    for place in range(ranks):
        with open_checkpoint(folder, process_group=Rank(place, ranks)) as held:
            told = {
                each.prefix: each.shares[ranks].bytes[place]
                for each in found.layers
                if each.shares[ranks].fits
            }
            got = {each.prefix: loaded_bytes(held, each) for each in found.layers if each.prefix in told}
        assert told == {prefix: told[prefix] if size is None else size for prefix, size in got.items()}


def test_what_a_rank_holds_of_a_model_is_what_its_tensors_are() -> None:
    said = config("llama")
    stored = tensors(said)
    whole = sum(tensor.nbytes for tensor in stored.values())

    found = plan(weights(said, stored), tp=(1, 2))

    assert found.worlds[1].bytes == (whole,)
    norms = sum(tensor.nbytes for name, tensor in stored.items() if "norm" in name or name.endswith("bias"))
    assert found.worlds[2].bytes == ((whole - norms) // 2 + norms,) * 2


def kinds(found: ShardingPlan, ranks: int) -> dict[str, Alternative]:
    return {each.kind: each for each in found.layers[0].shares[ranks].alternatives}


def test_inputs_that_do_not_divide_into_groups_by_hand() -> None:
    """Three groups of 64 inputs on two ranks: two and one, or four of which one is zero."""
    held = gptq(192, 64)
    group = 64 * 64 // 2 + 64 // 2 + 64 * 2  # codes, zero points and scales of a group of inputs

    found = kinds(plan(held, tp=2), 2)

    assert {kind: each.bytes for kind, each in found.items()} == {
        "uneven": 2 * group - 3 * group // 2,
        "padded": 2 * group - 3 * group // 2,
        "whole": 3 * group - 3 * group // 2,
    }
    assert found["uneven"].text == "128 inputs for each rank but the last, which has 64: whole blocks of 64"
    assert found["padded"].text == "K = 256, 64 inputs of zeros, 128 for each rank"


def test_an_uneven_share_of_outputs_is_one_that_loads() -> None:
    held = gptq(64, 24, "up_proj")

    text = kinds(plan(held, tp=2), 2)["uneven"].text

    last = Weights(held.storage, loader=held.loader, process_group=Rank(1, 2))
    assert text == "16 outputs for each rank but the last, which has 8: whole blocks of 8"
    assert last.get_partial_weights_col("up_proj").shape == (8, 64)


def test_heads_that_do_not_divide_are_padded_or_copied_by_hand() -> None:
    """Six heads of queries and three of keys, of 8 x 32 float32 each, on four ranks."""
    said = config("llama", num_attention_heads=6, num_key_value_heads=3)
    head = 8 * 32 * 4

    found = {
        layer.prefix.rpartition(".")[2]: layer.shares[4].alternatives
        for layer in plan(weights(said, tensors(said)), tp=4).layers
    }

    assert found["q_proj"] == (
        Alternative("padded", "8 query heads, 2 of them zero, 2 for each rank", 2 * head - 6 * head // 4),
        Alternative("whole", "all of the layer on each of 4 ranks", 6 * head - 6 * head // 4),
    )
    assert found["k_proj"][0] == Alternative(
        "copied", "all 3 key/value heads on each of 4 ranks", 3 * head - 3 * head // 4
    )
    assert found["o_proj"] == ()


def test_whole_experts_are_shared_out_among_runs_of_ranks() -> None:
    said = config("mixtral")
    expert = 3 * 32 * 48 * 4

    found = plan(weights(said, tensors(said)), tp=(2, 4, 8), ep=2)

    def held(ranks: int) -> list[int]:
        shares = [
            layer.shares[ranks].bytes
            for layer in found.layers
            if ".layers.0." in layer.prefix and "expert" in layer.prefix
        ]
        return [sum(each) for each in zip(*shares, strict=True)]

    assert held(2) == [2 * expert] * 2
    assert held(4) == [expert] * 4
    assert {layer.cut for layer in found.layers if ".experts." in layer.prefix} == {"experts"}


def test_ranks_that_are_no_runs_of_experts_are_refused_as_a_load_refuses_them() -> None:
    said = config("mixtral")
    held = weights(said, tensors(said))

    found = plan(held, tp=3, ep=2).layers

    three = weights(said, tensors(said), Rank(0, 3))
    name = f"{text_prefix_and_head(held)[0]}.layers.0.mlp.experts"
    why = refusal(lambda: three.get_experts(name, split="both", expert_ranks=2))
    assert why.startswith("expert_ranks: ranks = 3")
    assert {layer.shares[3].reason for layer in found if ".experts." in layer.prefix} == {why}


def test_layers_of_a_type_without_a_model_are_cut_as_their_names_are() -> None:
    found = {prefix: plan(gptq(64, 64, prefix), tp=2) for prefix in ("a.fc1", "a.fc2", "a.other")}

    assert [each.layers[0].cut for each in found.values()] == ["N", "K", "whole"]
    assert all("cut by the last part" in " ".join(each.notes) for each in found.values())


def test_a_note_says_why_a_config_of_a_known_type_has_no_model() -> None:
    said = config("llama")
    held = weights({**said, "num_hidden_layers": 5000}, tensors(said))

    (note,) = [note for note in plan(held, tp=2).notes if "cut by the last part" in note]
    assert "num_hidden_layers, expected at most 4096, got 5000" in note
    assert refusal(lambda: load_model(held, {**said, "num_hidden_layers": 5000})).startswith(
        "config.json: num_hidden_layers"
    )


def test_layers_that_are_alike_are_asked_once_and_name_themselves() -> None:
    one = gptq(192, 64, "a.down_proj")
    stored = {name: one.storage.read(name) for name in one.storage.keys()}  # noqa: SIM118, it is no dict
    stored |= {name.replace("a.", "b."): tensor for name, tensor in stored.items()}

    first, second = plan(Weights(MemoryStorage(stored), loader=one.loader), tp=2).layers

    assert first.shares[2].reason.startswith("a.down_proj.qzeros: cannot cut K = 192 at 96 for 2 ranks")
    assert second.shares[2].reason == first.shares[2].reason.replace("a.down_proj", "b.down_proj")
    assert replace(first.shares[2], error=None) == replace(second.shares[2], error=None)


def test_a_layer_that_cannot_be_read_fits_nowhere() -> None:
    held = gptq(64, 64)
    stored = {name: held.storage.read(name) for name in held.storage.keys()}  # noqa: SIM118, it is no dict
    del stored["down_proj.scales"]

    found = plan(Weights(MemoryStorage(stored), loader=held.loader), tp=(1, 2))

    assert not found.worlds[1].fits
    assert found.worlds[1].reason == refusal(
        lambda: Weights(MemoryStorage(stored), loader=held.loader).get_weights("down_proj")
    )


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.up_proj"])
def test_a_layer_that_is_not_stored_fits_nowhere_by_its_name(name: str) -> None:
    said = config("llama")
    stored, prefix = tensors(said), f"{text_prefix_and_head(weights(said, tensors(said)))[0]}.layers.1.{name}"
    del stored[f"{prefix}.weight"]
    held = weights(said, stored)

    found = plan(held, tp=(1, 2))

    (layer,) = (layer for layer in found.layers if layer.prefix == prefix)
    assert (layer.format, layer.shape) == (None, ())
    assert [share.fits for share in layer.shares.values()] == [False, False]
    assert {share.reason for share in layer.shares.values()} == {refusal(lambda: load_model(held, said))}
    assert layer.shares[1].reason.startswith(f"{prefix}.weight: not in the checkpoint")


@pytest.mark.parametrize(("prefix", "cut"), [("up_proj", "N"), ("down_proj", "K")])
def test_flat_codes_are_divided_along_both_axes_by_hand(prefix: str, cut: str) -> None:
    """Half of the codes and of the scales of blocks of 64; the tables are whole on every rank."""
    folder, name = FIXTURES / "bnb" / "nf4_nested_bf16_storage_128x256", "model.layers.0.self_attn.v_proj"
    with open_checkpoint(folder) as weights:
        storage, loader = weights.storage, weights.loader
        stored = {
            key.replace(name, prefix): storage.read(key)
            for key in storage.keys()  # noqa: SIM118, it is no dict
            if key.startswith(name)
        }
    codes, scales = 128 * 256 // 2, 128 * 256 // 64
    tables = sum(tensor.nbytes for tensor in stored.values()) - codes - scales

    (layer,) = plan(Weights(MemoryStorage(stored), loader=loader), tp=(1, 2, 4)).layers

    assert layer.cut == cut
    assert {ranks: share.bytes for ranks, share in layer.shares.items()} == {
        ranks: (codes // ranks + scales // ranks + tables,) * ranks for ranks in (1, 2, 4)
    }


def test_a_kernel_that_cannot_say_a_share_is_a_no_with_its_reason() -> None:
    """GPTQ of three bits, which Marlin's order has not, and ExLlama's has."""
    stored = {
        "a.down_proj.qweight": torch.zeros(12, 64, dtype=torch.int32),
        "a.down_proj.qzeros": torch.zeros(2, 6, dtype=torch.int32),
        "a.down_proj.scales": torch.zeros(2, 64, dtype=torch.float16),
    }
    held = Weights(MemoryStorage(stored), loader=loader_from_config({**GPTQ, "bits": 3}))

    refused, taken = (plan(held, tp=2, target=kernel).layers[0].shares[2] for kernel in ("marlin", "exllama"))

    assert taken.fits
    assert not refused.fits
    assert refused.reason.startswith("marlin: ")
    assert "3" in refused.reason
    assert sum(refused.bytes) == sum(tensor.nbytes for tensor in stored.values())


def test_every_refusal_names_its_own_layer() -> None:
    found = plan(MODELS[2], tp=3)

    refused = [layer for layer in found.layers if not layer.shares[3].fits]
    assert len(refused) == found.worlds[3].refused == 8
    assert all(layer.shares[3].reason.startswith(layer.prefix) for layer in refused)


def test_the_last_output_of_gate_is_a_cut_for_up_follows_it() -> None:
    """Eight zero points lie in a word: a gate of 12 outputs loads alone, and no up can follow it."""
    arguments = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 4}
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"experts": {"targets": [r"re:.*experts\.\d+\.w\d$"], "weights": arguments}},
    }
    said = config("mixtral", intermediate_size=12, num_hidden_layers=1, quantization_config=section)
    stored = tensors(said)
    for name in [name for name in stored if ".experts." in name]:
        (N, K), prefix = stored.pop(name).shape, name.removesuffix("weight")
        stored[f"{prefix}weight_packed"] = torch.zeros(N, -(-K // 8), dtype=torch.int32)
        stored[f"{prefix}weight_scale"] = torch.ones(N, K // 4)
        stored[f"{prefix}weight_zero_point"] = torch.zeros(-(-N // 8), K // 4, dtype=torch.int32)
        stored[f"{prefix}weight_shape"] = torch.tensor([N, K])
    held = weights(said, stored)
    experts = "model.layers.0.block_sparse_moe.experts"

    shares = {layer.prefix: layer.shares[1] for layer in plan(held, tp=1).layers}

    assert shares[f"{experts}.0.w1"].reason == refusal(lambda: held.get_experts(experts))
    assert "weight_zero_point: cannot cut N = 12 at 12" in shares[f"{experts}.0.w1"].reason
    assert shares[f"{experts}.0.w2"].fits
    assert shares[f"{experts}.0.w3"].fits


def test_a_matrix_other_than_a_vocabulary_has_no_short_last_share() -> None:
    storage = MemoryStorage({"model.up_proj.weight": torch.ones(10, 8)})

    (layer,) = plan(Weights(storage, loader=DefaultWeightsLoader()), tp=(2, 4)).layers

    assert layer.shares[2].bytes == (5 * 8 * 4, 5 * 8 * 4)
    assert layer.shares[4].reason.startswith("model.up_proj.weight: N = 10 does not divide into 4 ranks\n")
