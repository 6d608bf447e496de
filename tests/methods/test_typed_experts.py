"""The experts method of engines: every format, whole and in shares, and its refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qload import MemoryStorage, Weights, loader_from_config
from qload.errors import ArgumentError, CutError, MismatchError, MissingTensorError, NonfiniteScaleError
from qload.experts import ExpertFacts, GatedActivation
from qload.methods import TypedExpertsMethod
from qload.parallel import Rank
from qload.testing import assert_same_bits
from tests.models.with_transformers.stored import FORMATS, Format

pytestmark = pytest.mark.usefixtures("seen_texts")

H, INNER, EXPERTS, CHOSEN = 192, 192, 3, 2
PREFIX = "mlp.experts"
MATRICES = {"w1": ("gate_proj", INNER, H), "w3": ("up_proj", INNER, H), "w2": ("down_proj", H, INNER)}
FACTS = ExpertFacts(GatedActivation("silu"))
AWQ = FORMATS["awq"]
Tensors = dict[tuple[int, str, str], Tensor]  # by number of the expert, shard id and suffix


def stored_tensors(stored: Format, experts: int = EXPERTS) -> Tensors:
    """Tensors of all experts, by number, shard id and suffix."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(experts):
        for shard, (_, N, K) in MATRICES.items():
            fields = dict(stored.layer(N, K, generator))
            if "g_idx" in fields:
                fields["g_idx"] = fields["g_idx"].sort().values  # one order of inputs for gate and up
            tensors |= {(expert, shard, suffix): tensor for suffix, tensor in fields.items()}
    return tensors


def method_of(stored: Format, **options: Any) -> TypedExpertsMethod:
    loader: Any = loader_from_config(dict(stored.section))
    return TypedExpertsMethod(loader.formats, PREFIX, FACTS, **options)


def filled_layer(
    method: TypedExpertsMethod,
    tensors: Tensors,
    rank: Rank,
    experts: int = EXPERTS,
) -> Any:
    """A module whose parameters took every tensor."""
    layer: Any = nn.Module()
    method.create_weights(layer, experts, H, INNER // rank.size(), torch.float32, group=rank)
    for (expert, shard, suffix), tensor in tensors.items():
        name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix.replace('.', '_')}"
        param = getattr(layer, name)
        param.weight_loader(param, tensor, f"{PREFIX}.{expert}.{shard}.{suffix}", shard, expert)
    return layer


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Activations, routing weights and numbers of experts of five tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(5)])
    return torch.randn(5, H, generator=generator), torch.rand(5, CHOSEN, generator=generator), ids


def whole_weight(stored: Format, tensors: Tensors) -> Any:
    """The experts as the loader of checkpoints reads them."""
    names = {key: f"{PREFIX}.{key[0]}.{MATRICES[key[1]][0]}.{key[2]}" for key in tensors}
    storage = MemoryStorage({names[key]: tensor for key, tensor in tensors.items()})
    loader = loader_from_config(dict(stored.section))
    return Weights(storage, loader=loader, dtype=torch.float32).get_experts(PREFIX, facts=FACTS)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_an_engine_equal_those_of_a_checkpoint(name: str) -> None:
    stored = FORMATS[name]
    tensors = stored_tensors(stored)
    method = method_of(stored, target=None, activations="unquantized")
    layer = filled_layer(method, tensors, Rank(0, 1))

    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)

    whole = whole_weight(stored, tensors)
    for expert in range(EXPERTS):
        for loaded, wanted in zip(
            layer.typed_experts.typed.dequantize(expert), whole.dequantize(expert), strict=True
        ):
            assert_same_bits(loaded, wanted)
    x, shares, ids = inputs()
    wanted = whole.get_linear(activations="unquantized")(x, ids, shares)
    assert_same_bits(method.apply(layer, x, shares, ids), wanted)
    assert not dict(layer.named_parameters(recurse=False))
    assert not layer.expert_buffer.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_share_of_every_matrix(rank: int) -> None:
    tensors = stored_tensors(AWQ)
    method = method_of(AWQ, target=None)
    layer = filled_layer(method, tensors, Rank(rank, 2))
    method.finish(layer)

    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    whole = whole_weight(AWQ, tensors)
    for expert in range(EXPERTS):
        gate_up, down = layer.typed_experts.typed.dequantize(expert)
        gate, up = whole.dequantize(expert)[0].chunk(2)
        assert_same_bits(gate_up, torch.cat([gate[half], up[half]]))
        assert_same_bits(down, whole.dequantize(expert)[1][:, half])


def test_experts_of_another_rank_contribute_nothing() -> None:
    tensors = stored_tensors(AWQ, experts=1)
    method = method_of(AWQ, target=None)
    layer = filled_layer(method, tensors, Rank(0, 1), experts=1)
    method.finish(layer)
    x, shares, _ = inputs()
    ids = torch.tensor([[2, 0]] * len(x))
    expert_map = torch.tensor([-1, -1, 0], dtype=torch.int32)

    local = method.apply(layer, x, shares, ids, expert_map)

    only = torch.zeros(len(x), 1, dtype=torch.int64)
    assert_same_bits(local, whole_weight(AWQ, tensors).get_linear()(x, only, shares[:, :1]))
    assert not method.apply(layer, x, shares, ids - ids + 1, expert_map).any()


def test_the_parameters_stay_empty_until_the_layer_is_complete() -> None:
    tensors = stored_tensors(AWQ)
    method = method_of(AWQ)
    layer = filled_layer(method, tensors, Rank(0, 1))

    fields = ("qweight", "qzeros", "scales")
    names = {f"{prefix}_{field}" for prefix in ("w13", "w2") for field in fields}
    assert names <= {*dict(layer.named_parameters())}
    assert not sum(param.numel() for param in layer.parameters())
    assert layer.params_dtype == torch.float32


def test_incomplete_experts_are_refused() -> None:
    tensors = {key: tensor for key, tensor in stored_tensors(AWQ).items() if key[0] != EXPERTS - 1}
    method = method_of(AWQ)
    layer = filled_layer(method, tensors, Rank(0, 1))
    with pytest.raises(MismatchError, match=rf"{EXPERTS} experts"):
        method.process_weights_after_loading(layer)

    lost = (0, "w3", "scales")
    tensors = {key: tensor for key, tensor in stored_tensors(AWQ).items() if key != lost}
    layer = filled_layer(method, tensors, Rank(0, 1))
    with pytest.raises(MissingTensorError, match=rf"{PREFIX}\.0\.up_proj\.scales"):
        method.process_weights_after_loading(layer)


def test_scales_that_are_not_finite_are_refused_unless_allowed() -> None:
    tensors = stored_tensors(AWQ)
    tensors[1, "w2", "scales"][0, 0] = float("inf")
    method = method_of(AWQ, target=None)
    with pytest.raises(NonfiniteScaleError, match=rf"{PREFIX}\.1\.down_proj"):
        method.finish(filled_layer(method, tensors, Rank(0, 1)))

    allowed = method_of(AWQ, target=None, nonfinite="allow")
    allowed.finish(filled_layer(allowed, tensors, Rank(0, 1)))


@pytest.mark.parametrize("sizes", [(0, H, INNER), (EXPERTS, True, INNER), (EXPERTS, H, 1.0)])
def test_sizes_are_positive_integers(sizes: Any) -> None:
    with pytest.raises(ArgumentError, match=r"num_experts, hidden_size, .*\n.*at least 1"):
        method_of(AWQ).create_weights(nn.Module(), *sizes, torch.float32)


def test_weights_are_created_once() -> None:
    layer, method = nn.Module(), method_of(AWQ)
    method.create_weights(layer, EXPERTS, H, INNER, torch.float32)

    with pytest.raises(ArgumentError, match=rf"{PREFIX}\n.*a layer without weights"):
        method.create_weights(layer, EXPERTS, H, INNER, torch.float32)


def test_a_cut_inside_a_word_is_refused_before_a_tensor_arrives() -> None:
    with pytest.raises(CutError):
        method_of(AWQ).create_weights(nn.Module(), EXPERTS, H, INNER // 64, torch.float32, group=Rank(0, 64))


@pytest.mark.parametrize(("shard", "expert"), [("w4", 0), (0, 0), ("w1", EXPERTS), ("w1", -1)])
def test_another_matrix_or_expert_is_refused_by_name(shard: Any, expert: int) -> None:
    layer: Any = nn.Module()
    method_of(AWQ).create_weights(layer, EXPERTS, H, INNER, torch.float32)
    param = layer.w13_scales

    with pytest.raises(ArgumentError, match=rf"{PREFIX}: shard_id, expert_id\n.*below {EXPERTS}\n"):
        param.weight_loader(param, torch.ones(12, INNER), "name", shard, expert)


def test_a_call_before_the_load_ends_is_refused() -> None:
    layer, method = nn.Module(), method_of(AWQ)
    method.create_weights(layer, EXPERTS, H, INNER, torch.float32)
    x, shares, ids = inputs()

    with pytest.raises(ArgumentError, match="process_weights_after_loading before the first call"):
        method.apply(layer, x, shares, ids)


def test_facts_have_their_type() -> None:
    with pytest.raises(ArgumentError, match="facts"):
        TypedExpertsMethod((), PREFIX, "silu")  # type: ignore[arg-type]
