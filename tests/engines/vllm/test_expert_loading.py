"""Experts that an engine fills tensor by tensor, as vLLM's are, without vLLM."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qload import MemoryStorage, Weights, loader_from_config
from qload.engines.vllm.checkpoint import CheckpointNames
from qload.engines.vllm.weight_loading import check_parallelism, expert_facts, finish_experts_when_loaded
from qload.errors import ArgumentError, CutError, MismatchError, UnsupportedFormatError
from qload.experts import ExpertFacts, GatedActivation
from qload.methods import TypedExpertsMethod
from qload.parallel import Rank
from qload.testing import assert_same_bits
from tests.models.with_transformers.stored import FORMATS as STORED

AWQ, GPTQ = STORED["awq"], STORED["gptq"]
H, INNER, EXPERTS = 32, 64, 4
MATRICES = (("w1", INNER, H), ("w3", INNER, H), ("w2", H, INNER))
FACTS = ExpertFacts(GatedActivation("silu"))


class Layer(nn.Module):
    """As vLLM's experts: those of `here` are on this rank, under numbers of its own."""

    def __init__(self, here: list[int], expert_map: Tensor | None = None, **said: Any) -> None:
        super().__init__()
        self.layer_name = "mlp.experts"
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "w1", "w3", "w2"
        self.here, self.expert_map, self.local_num_experts = here, expert_map, len(here)
        self.params_dtype = torch.float32
        self.activation = SimpleNamespace(value="silu")
        self.swiglu_limit: float | None = None
        self.swiglu_alpha: float | None = None
        self.apply_router_weight_on_input = False
        for name, value in said.items():
            setattr(self, name, value)
        self.expert_facts = expert_facts(self)

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return self.here.index(expert) if expert in self.here else -1


def drawn(stored: Any = AWQ) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    found = {}
    for expert in range(EXPERTS):
        for matrix, N, K in MATRICES:
            fields = stored.layer(N, K, make)
            if "g_idx" in fields:
                fields["g_idx"] = fields["g_idx"].sort().values  # one order of inputs for gate and up
            found |= {f"mlp.experts.{expert}.{matrix}.{suffix}": tensor for suffix, tensor in fields.items()}
    return found


def filled(
    layer: Layer, tensors: Mapping[str, Tensor], group: Rank, names: CheckpointNames, stored: Any = AWQ
) -> list[bool]:
    """Whether the experts were done after each tensor."""
    loader: Any = loader_from_config(dict(stored.section))
    sizes = (layer.local_num_experts, H, INNER // group.size())
    layer.method = typed = TypedExpertsMethod(  # type: ignore[assignment]
        loader.formats, layer.layer_name, layer.expert_facts, target=None, activations="unquantized"
    )
    typed.create_weights(layer, *sizes, torch.float32, group=group)
    finish_experts_when_loaded(layer, typed, names)
    done = []
    for name, tensor in tensors.items():
        number, matrix, suffix = name.removeprefix("mlp.experts.").split(".", 2)
        param: Any = getattr(layer, f"{'w2' if matrix == 'w2' else 'w13'}_{suffix}")  # also when it is done
        said = param.weight_loader(
            param, tensor, name, shard_id=matrix, expert_id=int(number), return_success=True
        )
        assert said == (int(number) in layer.here)
        done.append(hasattr(layer, "typed_experts"))
    return done


def finish(layer: Any) -> None:
    layer.method.finish(layer)


def apply_experts(layer: Any, x: Tensor, shares: Tensor, ids: Tensor) -> Tensor:
    y: Tensor = layer.method.apply(layer, x, shares, ids, layer.expert_map)
    return y


def wanted(
    tensors: Mapping[str, Tensor], x: Tensor, ids: Tensor, shares: Tensor, stored: Any = AWQ
) -> Tensor:
    """By qload's own load of the whole layer."""
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(dict(stored.section)))
    made: Tensor = weights.get_experts("mlp.experts", facts=FACTS).get_linear()(x, ids, shares)
    return made


def known(folder: Path, tensors: Mapping[str, Tensor]) -> CheckpointNames:
    save_file({**tensors}, folder / "model.safetensors")
    return CheckpointNames(str(folder))


def chosen() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(EXPERTS, generator=make)[:2] for _ in range(6)])
    return torch.randn(6, H, generator=make), ids.int(), torch.rand(6, 2, generator=make)


def close(got: Tensor, want: Tensor) -> bool:
    """Within what sums of float32 in another order may differ by."""
    return bool((got - want).abs().max() <= 2 * INNER * 2**-23 * want.abs().max())


def test_all_experts_on_one_rank_are_done_by_the_last_tensor(tmp_path: Path) -> None:
    tensors, layer = drawn(), Layer([*range(EXPERTS)])

    done = filled(layer, tensors, Rank(0, 1), known(tmp_path, tensors))

    assert done == [False] * (len(tensors) - 1) + [True]
    x, ids, shares = chosen()
    assert_same_bits(apply_experts(layer, x, shares, ids), wanted(tensors, x, ids, shares))
    assert not layer.expert_buffer.keys()  # type: ignore[union-attr,operator]
    assert not sum(param.numel() for param in layer.parameters())
    layer.method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]
    assert {*dict(layer.named_parameters())} == {"w13_bias", "w2_bias"}  # registered by the adapter


@pytest.mark.parametrize(
    "stored", [AWQ, GPTQ], ids=["awq", "gptq"]
)  # GPTQ's zero points follow from the codes
def test_shares_of_all_experts_sum_to_the_whole(stored: Any, tmp_path: Path) -> None:
    tensors, (x, ids, shares) = drawn(stored), chosen()
    names = known(tmp_path, tensors)
    summands = []
    for rank in range(2):
        layer = Layer([*range(EXPERTS)])
        filled(layer, tensors, Rank(rank, 2), names, stored)
        assert layer.typed_experts.typed.shape == (EXPERTS, H, INNER // 2)  # type: ignore[union-attr]
        summands.append(apply_experts(layer, x, shares, ids))

    assert close(sum(summands, torch.zeros(())), wanted(tensors, x, ids, shares, stored))


def test_whole_experts_sum_to_the_whole_whatever_their_numbers_here(tmp_path: Path) -> None:
    tensors, (x, ids, shares) = drawn(), chosen()
    names = known(tmp_path, tensors)
    summands = []
    for here in ([2, 0], [1, 3]):
        places = torch.tensor([here.index(e) if e in here else -1 for e in range(EXPERTS)], dtype=torch.int32)
        layer = Layer(here, places)
        assert filled(layer, tensors, Rank(0, 1), names)[-1]
        summands.append(apply_experts(layer, x, shares, ids))

    assert close(sum(summands, torch.zeros(())), wanted(tensors, x, ids, shares))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_share_of_every_matrix(rank: int, tmp_path: Path) -> None:
    tensors, layer = drawn(), Layer([*range(EXPERTS)])
    filled(layer, tensors, Rank(rank, 2), known(tmp_path, tensors))
    loader = loader_from_config(dict(AWQ.section))
    whole = Weights(MemoryStorage(tensors), loader=loader).get_experts("mlp.experts", facts=FACTS)

    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    for expert in range(EXPERTS):
        gate_up, down = layer.typed_experts.typed.dequantize(expert)  # type: ignore[union-attr,operator]
        gate, up = whole.dequantize(expert)[0].chunk(2)
        assert_same_bits(gate_up, torch.cat([gate[half], up[half]]))
        assert_same_bits(down, whole.dequantize(expert)[1][:, half])


def test_experts_have_numbers_of_their_own_on_a_rank() -> None:
    layer = Layer([3, 1])
    filled(layer, drawn(), Rank(0, 1), CheckpointNames())

    names = layer.expert_buffer.keys()  # type: ignore[union-attr,operator]
    assert {name.split(".")[2] for name in names} == {"0", "1"}


def test_tokens_of_experts_elsewhere_get_nothing(tmp_path: Path) -> None:
    tensors, (x, _, shares) = drawn(), chosen()
    layer = Layer([0, 1], torch.tensor([0, 1, -1, -1], dtype=torch.int32))
    filled(layer, tensors, Rank(0, 1), known(tmp_path, tensors))

    there = torch.tensor([[2, 3]] * len(x))
    assert not apply_experts(layer, x, shares, there).any()
    assert bool(apply_experts(layer, x, shares, there - 2).any())


def test_experts_that_never_came_are_counted_on_a_rank_of_some() -> None:
    tensors = {name: tensor for name, tensor in drawn().items() if ".1." not in name}
    layer = Layer([3, 1], torch.tensor([-1, 1, -1, 0], dtype=torch.int32))
    filled(layer, tensors, Rank(0, 1), CheckpointNames())

    with pytest.raises(MismatchError, match="2 experts"):
        finish(layer)


def test_experts_that_never_came_are_counted() -> None:
    tensors = {name: tensor for name, tensor in drawn().items() if ".3." not in name}
    layer = Layer([*range(EXPERTS)])
    assert not any(filled(layer, tensors, Rank(0, 1), CheckpointNames()))

    with pytest.raises(MismatchError, match="4 experts"):
        finish(layer)


def test_a_bias_that_means_something_is_refused_and_one_of_zeros_is_not() -> None:
    layer: Any = Layer([*range(EXPERTS)])
    filled(layer, {}, Rank(0, 1), CheckpointNames())
    said = {"weight_name": "mlp.experts.2.w2.bias", "shard_id": "w2", "expert_id": 2, "return_success": True}

    assert layer.w2_bias.weight_loader(param=layer.w2_bias, loaded_weight=torch.zeros(H), **said)
    with pytest.raises(UnsupportedFormatError, match=r"mlp\.experts\.2: .*\n.*a bias other than 0"):
        layer.w2_bias.weight_loader(param=layer.w2_bias, loaded_weight=torch.ones(H), **said)


def test_a_loader_tells_of_its_success_where_it_is_asked_to() -> None:
    layer: Any = Layer([*range(EXPERTS)])
    filled(layer, {}, Rank(0, 1), CheckpointNames())
    name, tensor = next(iter(drawn().items()))
    number, matrix, suffix = name.removeprefix("mlp.experts.").split(".", 2)
    param = getattr(layer, f"{'w2' if matrix == 'w2' else 'w13'}_{suffix}")

    assert param.weight_loader(param, tensor, name, shard_id=matrix, expert_id=int(number)) is None


def test_a_cut_inside_of_a_word_is_refused_before_a_tensor_comes() -> None:
    with pytest.raises(CutError):
        filled(Layer([0]), {}, Rank(0, 16), CheckpointNames())


@pytest.mark.parametrize(
    "said",
    [{"activation": SimpleNamespace(value="relu2")}, {"swiglu_limit": 7.0}, {"swiglu_alpha": 1.7}],
    ids=str,
)
def test_what_stands_between_and_is_not_known_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"mlp\.experts: activation"):
        Layer([0], **said)


def parallel(**said: Any) -> SimpleNamespace:
    """vLLM's config of experts on two ranks."""
    sizes = {"tp_size": 2, "dp_size": 1, "pcp_size": 1, "sp_size": 1, "ep_size": 1, "use_ep": False}
    known = {**sizes, "enable_eplb": False, "all2all_backend": "allgather_reducescatter", **said}
    lora = bool(known.pop("is_lora_enabled", False))
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(**known), is_lora_enabled=lora)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"dp_size": 2, "use_ep": True}, "data_parallel_size"),
        ({"pcp_size": 2}, "prefill_context_parallel_size"),
        ({"sp_size": 2, "use_ep": True}, "sequence parallel ranks"),
        ({"use_ep": True, "all2all_backend": "passthrough"}, "all2all_backend"),
        ({"use_ep": True, "enable_eplb": True}, "enable_eplb"),
        ({"is_lora_enabled": True}, "enable_lora"),
    ],
)
def test_a_way_to_run_experts_that_was_not_tried_is_refused_by_its_name(
    said: dict[str, Any], name: str
) -> None:
    with pytest.raises(ArgumentError, match=rf"^mlp\.experts: {name}\n"):
        check_parallelism("mlp.experts", parallel(**said))


@pytest.mark.parametrize(
    "said", [{}, {"use_ep": True, "tp_size": 1, "ep_size": 2}, {"all2all_backend": "passthrough"}], ids=str
)
def test_shares_and_whole_experts_run(said: dict[str, Any]) -> None:
    check_parallelism("mlp.experts", parallel(**said))


def test_the_routing_weight_may_go_on_the_input() -> None:
    assert Layer([0], apply_router_weight_on_input=True).expert_facts.side == "input"
    assert Layer([0]).expert_facts == FACTS
