"""Models of every type: loaded whole and cut, fed at once and token by token; refusals before any answer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qload import DefaultWeightsLoader, Fp8Weight, MemoryStorage, UnquantizedWeight
from qload.errors import (
    ConfigError,
    CutError,
    DivideError,
    MismatchError,
    MissingTensorError,
    ShapeError,
    StorageError,
)
from qload.models import FAMILIES, PagedCache, Step, load_model, text_config
from qload.parallel import Collectives, FakeWorld
from qload.quantize import Fp8Quantizer, QuantizingLoader
from qload.quantize.policy import mlp_only
from tests.models.drawn import config, tensors, weights
from tests.models.recorded import Rounded, logits, off, recorded
from tests.paths import FIXTURES

pytestmark = pytest.mark.usefixtures("seen_texts", "seen_logs")

MODELS = sorted((FIXTURES / "models").iterdir())
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])
RANGE = 1e-5  # of the logits: sums of float32 in another order
kinds = pytest.mark.parametrize("kind", FAMILIES)


@pytest.mark.parametrize("folder", MODELS, ids=lambda path: path.name)
def test_a_model_of_another_tool_has_its_recorded_logits(folder: Path) -> None:
    ids, want = recorded(folder)

    assert off(logits(Rounded.of(folder).load(folder), ids), want) < RANGE


@kinds
def test_tokens_one_by_one_have_the_logits_of_all_at_once(kind: str) -> None:
    said = config(kind)
    model = load_model(weights(said, tensors(said)), said)

    assert off(logits(model, IDS, chunks=IDS.shape[1]), logits(model, IDS)) < RANGE


SPLITS = [(kind, "tensor") for kind in FAMILIES]
SPLITS += [(kind, "experts") for kind in FAMILIES if text_config(config(kind)).sparse_layers]


@pytest.mark.parametrize(("kind", "split"), SPLITS)
def test_ranks_agree_bit_for_bit_and_have_the_logits_of_one(kind: str, split: Any) -> None:
    said, stored = config(kind), tensors(config(kind))
    want = logits(load_model(weights(said, stored), said), IDS)

    def work(group: Collectives) -> Tensor:
        model = load_model(weights(said, stored, group), said, expert_split=split)
        return logits(model, IDS, ranks=group.size())

    for ranks in (2, 4):  # of four, two have the same heads of keys
        first, *others = FakeWorld(ranks).run(work)
        assert all(torch.equal(first, other) for other in others)
        assert off(first, want) < RANGE


@kinds
def test_every_tensor_is_read_once_and_what_the_ledger_knows_is_left(kind: str) -> None:
    said = config(kind)
    held = weights(said, tensors(said))
    load_model(held, said)

    assert held.report().complete


@kinds
def test_one_layer_is_a_model_too(kind: str) -> None:
    lists = {"no_rope_layers": [1]} if kind == "llama4_text" else {}
    said = config(kind, num_hidden_layers=1, **lists)

    assert logits(load_model(weights(said, tensors(said)), said), IDS).isfinite().all()


@pytest.mark.parametrize("kind", ["qwen3", "llama4_text", "gpt_oss"])
def test_a_step_may_be_rewritten_in_place_between_passes(kind: str) -> None:
    """As one whose addresses a CUDA graph holds is."""
    said = config(kind)
    model = load_model(weights(said, tensors(said)), said)
    caches = [PagedCache.of(model.config, pages=2, page_size=8, dtype=torch.float32) for _ in range(2)]
    held = Step.of([0], tokens=1, pages=[[1, 0]], page_size=8)

    for at, word in enumerate(IDS[0]):
        new = Step.of([at], tokens=1, pages=[[1, 0]], page_size=8)
        held.positions.copy_(new.positions)
        held.slots.copy_(new.slots)
        assert torch.equal(model(word[None], held, caches[0]), model(word[None], new, caches[1]))


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_answer_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    said = config(kind)
    model = load_model(weights(said, tensors(said), dtype=dtype), said)
    cache = PagedCache.of(model.config, pages=2, page_size=8, dtype=dtype)

    got = model(IDS[0], Step.of([0], tokens=10, pages=[[1, 0]], page_size=8), cache)

    assert got.dtype is dtype
    want = logits(load_model(weights(said, tensors(said)), said), IDS)[0]
    near = torch.finfo(dtype).eps * (want.max() - want.min()) * model.config.hidden
    assert (got - want).abs().median() <= near


def stacked(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same experts in two tensors a layer, inputs first: gate and up in turns, or one after the other."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for lead in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        gate, up, down = (
            torch.stack([tensors[f"{lead}.experts.{e}.{part}_proj.weight"] for e in range(4)])
            for part in ("gate", "up", "down")
        )
        both = torch.stack([gate, up], 2).flatten(1, 2) if kind == "gpt_oss" else torch.cat([gate, up], 1)
        found[f"{lead}.experts.gate_up_proj"] = both.transpose(1, 2).contiguous()
        found[f"{lead}.experts.down_proj"] = down.transpose(1, 2).contiguous()
    return found


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_trap_56_stacks_of_experts_are_read_in_their_order_whole_and_cut(kind: str) -> None:
    said = config(kind)
    apart = tensors(said)
    together = stacked(kind, apart)
    assert len(together) < len(apart)

    def work(group: Collectives) -> tuple[Tensor, Tensor]:
        models = (load_model(weights(said, held, group), said) for held in (apart, together))
        first, second = (logits(model, IDS, ranks=group.size()) for model in models)
        return first, second

    for ranks in (1, 2):
        assert all(torch.equal(first, second) for first, second in FakeWorld(ranks).run(work))


def test_trap_56_experts_that_are_not_alike_are_refused() -> None:
    said = config("mixtral")
    stored = tensors(said)
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    stored[name] = stored[name].half()

    with pytest.raises(MismatchError, match=r"experts\.2"):
        load_model(weights(said, stored), said)


@pytest.mark.parametrize(
    ("lead", "head"),
    [
        ("model.language_model.", "lm_head"),
        ("language_model.model.", "language_model.lm_head"),
        ("model.text_model.", "lm_head"),
    ],
)
def test_the_text_of_a_model_that_sees_is_found_by_what_its_names_begin_with(lead: str, head: str) -> None:
    said = config("llama")
    outer = {"model_type": "any", "text_config": said}
    stored = tensors(said)
    names = {name: name.replace("model.", lead, 1).replace("lm_head", head, 1) for name in stored}
    renamed = {names[name]: tensor for name, tensor in stored.items()}

    got = logits(load_model(weights(outer, renamed), outer), IDS)

    assert torch.equal(got, logits(load_model(weights(said, stored), said), IDS))


def test_trap_65_a_tied_head_is_the_embedding_also_of_a_vocabulary_that_ranks_do_not_divide() -> None:
    said = config("llama", tie_word_embeddings=True, vocab_size=37)
    stored = tensors(said)
    assert "lm_head.weight" not in stored
    untied = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}
    apart = {**said, "tie_word_embeddings": False}
    want = logits(load_model(weights(apart, untied), apart), IDS)

    def work(group: Collectives) -> Tensor:
        return logits(load_model(weights(said, stored, group), said), IDS, ranks=group.size())

    assert torch.equal(work(next(iter(FakeWorld(1)))), want)
    assert all(off(got, want) < RANGE for got in FakeWorld(2).run(work))


def test_trap_66_fewer_heads_of_keys_than_ranks_are_repeated() -> None:
    said = config("qwen3", num_key_value_heads=1)
    stored = tensors(said)
    want = logits(load_model(weights(said, stored), said), IDS)

    def work(group: Collectives) -> Tensor:
        return logits(load_model(weights(said, stored, group), said), IDS, ranks=group.size())

    assert all(off(got, want) < RANGE for got in FakeWorld(4).run(work))


@pytest.mark.parametrize("layers", [1, 3])
def test_fp8_while_loading_touches_the_mlp_alone_and_keeps_its_blocks(layers: int) -> None:
    said = config("llama", num_hidden_layers=layers)
    quantizer = Fp8Quantizer(per="block", block=(16, 16))
    loader = QuantizingLoader(DefaultWeightsLoader(), quantizer, policy=mlp_only(blocks=layers))
    formats: dict[str, type] = {}

    def make(weight: Any, bias: Tensor | None, maximum: Any) -> torch.nn.Module:
        formats[weight.layer.name] = type(weight)
        return weight.get_linear(bias, maximum=maximum, activations="unquantized")

    held = weights(said, tensors(said), loader=loader)
    model = load_model(held, said, make=make)

    assert {name for name, kind in formats.items() if kind is Fp8Weight} == {
        name for name in formats if ".mlp." in name
    }
    assert len([name for name in formats if ".mlp." in name]) == 2 * layers
    assert set(formats.values()) == {Fp8Weight, UnquantizedWeight}
    assert model.blocks[0].mlp.down_proj.typed_linear.typed.config.block == (16, 16)
    assert logits(model, IDS).isfinite().all()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.q_proj.weight", (24, 32)),
        ("model.layers.1.self_attn.o_proj.weight", (32, 24)),
        ("model.layers.0.mlp.up_proj.weight", (40, 32)),
        ("model.layers.0.mlp.down_proj.weight", (32, 40)),
        ("model.layers.0.input_layernorm.weight", (31,)),
        ("model.norm.weight", (32, 1)),
        ("model.embed_tokens.weight", (39, 32)),
        ("lm_head.weight", (40, 31)),
        ("lm_head.weight", (39, 32)),
    ],
)
def test_tensors_of_other_sizes_than_the_config_says_are_refused_by_name(name: str, shape: Any) -> None:
    said = config("llama")
    stored = tensors(said) | {name: torch.zeros(shape)}

    with pytest.raises(ShapeError) as refusal:
        load_model(weights(said, stored), said)
    assert name.startswith(refusal.value.tensor)


@pytest.mark.parametrize("name", ["self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.down_proj.bias"])
def test_a_bias_that_the_config_promises_has_to_be_there(name: str) -> None:
    said = config("llama")
    stored = tensors(said)
    del stored[f"model.layers.1.{name}"]

    with pytest.raises(MissingTensorError, match=f"model.layers.1.{name}"):
        load_model(weights(said, stored), said)


@pytest.mark.parametrize("name", ["sinks", "q_proj.weight"])
def test_what_is_missing_is_named(name: str) -> None:
    said = config("gpt_oss")
    stored = tensors(said)
    del stored[f"model.layers.1.self_attn.{name}"]

    with pytest.raises(MissingTensorError, match=f"model.layers.1.self_attn.{name}"):
        load_model(weights(said, stored), said)


class Counted(MemoryStorage):
    """A storage that notes what was read of it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.seen: set[str] = set()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        self.seen.add(name)
        return super().read(name, index)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek_v3"])
def test_a_cut_of_the_last_layer_that_is_not_lawful_is_refused_before_anything_is_read(kind: str) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    said = config(kind, quantization_config=section)
    stored = tensors(said)
    name = max(each for each in stored if each.endswith(("down_proj.weight", "w2.weight")))
    stored[name] = stored[name].to(torch.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = torch.ones(-(-stored[name].shape[0] // 16), -(-stored[name].shape[1] // 16))
    if ".experts." in name:  # which are all alike
        for e in range(4):
            one = name.replace(".experts.3.", f".experts.{e}.")
            stored[one] = stored[one].to(torch.float8_e4m3fn)
            stored[f"{one}_scale_inv"] = stored[f"{name}_scale_inv"]
    seen: set[str] = set()

    def work(group: Collectives) -> None:
        held = weights(said, stored, group)
        held.storage = counted = Counted(stored)
        try:
            load_model(held, said)
        finally:
            seen.update(counted.seen)

    with pytest.raises(CutError, match="cannot cut K"):
        FakeWorld(2).run(work)
    assert seen == set()


def test_a_world_that_does_not_divide_the_heads_is_refused() -> None:
    said = config("llama")
    stored = tensors(said)

    with pytest.raises(DivideError, match="query heads"):
        FakeWorld(3).run(lambda group: load_model(weights(said, stored, group), said))


def test_a_folder_without_a_config_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"no \*\.safetensors file"):
        load_model(tmp_path)
    save_file({"norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="model_type"):
        load_model(tmp_path)


def test_a_tensor_of_no_layer_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    said = config("llama")
    name = "model.layers.0.self_attn.q_norm.weight"
    load_model(weights(said, tensors(said) | {name: torch.ones(8)}), said)

    assert f"1 tensors belong to no layer of a llama model: {name}" in caplog.text
