"""vLLM's calls of the methods of linear layers, heads, embeddings and experts.

Codes, scales and inputs are small integers and powers of two, so that every sum of float32 is exact.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from qload.errors import MissingTensorError
from qload.testing import assert_same_bits
from tests.models.with_transformers.stored import compressed

K, N, VOCABULARY = 16, 24, 20
H, INNER, EXPERTS = 16, 32, 4
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
SECTION = compressed("int-quantized", INT8) | {"ignore": ["re:.*experts.*gate$"]}
MATRICES = {"w1": (INNER, H), "w3": (INNER, H), "w2": (H, INNER)}
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


def random_layer(rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    codes = torch.randint(-3, 4, (rows, columns), generator=generator, dtype=torch.int8)
    return {"weight": codes, "weight_scale": 2.0 ** torch.randint(-2, 1, (rows, 1), generator=generator)}


def random_model(**shapes: tuple[int, int]) -> dict[str, Tensor]:
    """Tensors of layers by name, with `__` for dots."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name.replace('__', '.')}.{suffix}": tensor
        for name, shape in shapes.items()
        for suffix, tensor in random_layer(*shape, generator).items()
    }


def matrix(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).float()


def config_of(plugin: Any, folder: Path, tensors: Mapping[str, Tensor], **section: Any) -> Any:
    save_file({**tensors}, folder / "model.safetensors")
    config = plugin.config.QloadQuantizationConfig.from_config({**SECTION, **section})
    config.maybe_update_config(str(folder))
    return config


def load(layer: Any, tensors: Mapping[str, Tensor], names: Mapping[str, Any]) -> None:
    """Deliver the tensors of layers, `names`, with their shard ids to the parameters of `layer`."""
    params = dict(layer.named_parameters())
    for name, shard in names.items():
        for suffix in ("weight", "weight_scale"):
            param = params[suffix]
            param.weight_loader(param, tensors[f"{name}.{suffix}"], *([] if shard is None else [shard]))


def vocabulary_layer(
    plugin: Any, kind: str, config: Any, prefix: str, rows: tuple[int, int] = (0, VOCABULARY), size: int = 32
) -> Any:
    """Create a head or embeddings, as vLLM's constructor does."""
    vocabulary = plugin.vllm["vllm.model_executor.layers.vocab_parallel_embedding"]
    layer = getattr(vocabulary, kind)(VOCABULARY, K, rows, size)
    layer.quant_method = config.get_quant_method(layer, prefix)
    sizes = (K, [size], K, layer.output_size)
    layer.params_dtype = torch.float32
    layer.quant_method.create_weights(layer, *sizes, params_dtype=torch.float32, weight_loader=no_loader)
    return layer


def no_loader(*_: Any) -> None:
    raise AssertionError("vLLM's own loader, which cuts by attributes")


def linear_layer(plugin: Any, config: Any, prefix: str, sizes: list[int]) -> Any:
    layer = plugin.vllm["vllm.model_executor.layers.linear"].LinearBase(K, sum(sizes))
    layer.quant_method = config.get_quant_method(layer, prefix)
    layer.quant_method.create_weights(
        layer,
        input_size_per_partition=K,
        output_partition_sizes=sizes,
        input_size=K,
        output_size=sum(sizes),
        params_dtype=torch.float32,
        weight_loader=no_loader,
    )
    return layer


def test_a_merged_layer_multiplies_after_its_last_tensor(plugin: Any, tmp_path: Path) -> None:
    tensors = random_model(up__gate_proj=(N, K), up__up_proj=(N, K))
    config = config_of(plugin, tmp_path, tensors)
    config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    layer = linear_layer(plugin, config, "up.gate_up_proj", [N, N])
    assert isinstance(layer.quant_method, plugin.vllm["vllm.model_executor.layers.linear"].LinearMethodBase)

    load(layer, tensors, {"up.gate_proj": 0})
    assert not hasattr(layer, "typed_linear")
    load(layer, tensors, {"up.up_proj": 1})

    linear = layer.typed_linear
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.typed_linear is linear
    x, bias = integers(3, K), integers(2 * N)
    want = x @ torch.cat([matrix(tensors, f"up.{part}_proj") for part in ("gate", "up")]).T
    assert_same_bits(layer.quant_method.apply(layer, x), want)
    assert_same_bits(layer.quant_method.apply(layer, x, bias), want + bias)


def test_a_layer_without_files_is_finished_after_loading(plugin: Any) -> None:
    tensors = random_model(down=(N, K))
    config = plugin.config.QloadQuantizationConfig.from_config(SECTION)
    layer = linear_layer(plugin, config, "down", [N])

    load(layer, tensors, {"down": None})
    assert not hasattr(layer, "typed_linear")
    layer.quant_method.process_weights_after_loading(layer)

    assert_same_bits(layer.quant_method.apply(layer, torch.eye(K)), matrix(tensors, "down").T.contiguous())


def test_a_layer_with_a_missing_tensor_names_it(plugin: Any) -> None:
    layer = linear_layer(plugin, plugin.config.QloadQuantizationConfig.from_config(SECTION), "down", [N])
    param = layer.weight
    param.weight_loader(param, torch.zeros(N, K, dtype=torch.int8))

    with pytest.raises(MissingTensorError, match=r"down\.weight_scale"):
        layer.quant_method.process_weights_after_loading(layer)


SHARES = [((0, VOCABULARY), 32), ((0, 16), 16), ((16, VOCABULARY), 16)]  # rows, and the padded size


@pytest.mark.parametrize(("rows", "size"), SHARES)
def test_a_head_pads_the_logits_of_its_rows(
    rows: tuple[int, int], size: int, plugin: Any, tmp_path: Path
) -> None:
    tensors = random_model(lm_head=(VOCABULARY, K))
    config = config_of(plugin, tmp_path, tensors)
    head = vocabulary_layer(plugin, "ParallelLMHead", config, HEAD, rows, size)

    load(head, tensors, {HEAD: None})
    linear = head.typed_linear
    head.quant_method.process_weights_after_loading(head)

    assert head.typed_linear is linear
    x, bias = integers(2, 3, K), integers(size)
    want = functional.pad(x @ matrix(tensors, HEAD)[slice(*rows)].T, (0, size - rows[1] + rows[0]))
    assert_same_bits(head.quant_method.apply(head, x), want)
    assert_same_bits(head.quant_method.apply(head, x, bias), want + bias)


@pytest.mark.parametrize(("rows", "size"), SHARES)
@pytest.mark.parametrize("has_files", [True, False])
def test_embeddings_look_up_rows(
    has_files: bool, rows: tuple[int, int], size: int, plugin: Any, tmp_path: Path
) -> None:
    tensors = random_model(model__embed_tokens=(VOCABULARY, K))
    config = config_of(plugin, tmp_path, tensors)
    embeddings = vocabulary_layer(plugin, "VocabParallelEmbedding", config, EMBEDDING, rows, size)
    if not has_files:
        config.maybe_update_config("")
        again = plugin.methods.QloadEmbeddingMethod(embeddings.quant_method.typed, config.names)
        embeddings = type(embeddings)(VOCABULARY, K, rows, size)
        embeddings.quant_method = again
        again.create_weights(embeddings, K, [size], K, size, params_dtype=torch.float32)

    load(embeddings, tensors, {EMBEDDING: None})
    assert hasattr(embeddings, "typed_linear") == has_files
    for _ in range(2):  # vLLM may call it again
        embeddings.quant_method.process_weights_after_loading(embeddings)

    assert embeddings.typed_linear is None
    assert not embeddings.state_dict()  # the rows are no tensor of a checkpoint
    tokens = torch.tensor([[0, rows[1] - rows[0] - 1], [size - 1, 2]])
    table = functional.pad(matrix(tensors, EMBEDDING)[slice(*rows)], (0, 0, 0, size - rows[1] + rows[0]))
    assert_same_bits(embeddings.quant_method.embedding(embeddings, tokens), table[tokens])
    x, bias = integers(3, K), integers(size)
    assert_same_bits(embeddings.quant_method.apply(embeddings, x), x @ table.T)
    assert_same_bits(embeddings.quant_method.apply(embeddings, x, bias), x @ table.T + bias)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_head_tied_to_quantized_embeddings_multiplies_by_their_rows(
    is_stored: bool, plugin: Any, tmp_path: Path
) -> None:
    tensors = random_model(model__embed_tokens=(VOCABULARY, K))
    stored = tensors | {f"{HEAD}.weight": torch.zeros(VOCABULARY, K)}  # plain, and unused
    config = config_of(plugin, tmp_path, stored if is_stored else tensors)
    embeddings = vocabulary_layer(plugin, "VocabParallelEmbedding", config, EMBEDDING)
    head = plugin.vllm["vllm.model_executor.layers.vocab_parallel_embedding"].ParallelLMHead(
        VOCABULARY, K, (0, VOCABULARY), 32
    )
    head.quant_method = config.get_quant_method(head, HEAD)
    if is_stored:
        assert type(head.quant_method) is plugin.methods.PlainHeadMethod
        head.register_parameter("weight", nn.Parameter(torch.full((32, K), torch.nan)))
    else:
        head.quant_method.create_weights(head, K, [32], K, 32, params_dtype=torch.float32)
        assert dict(head.named_parameters())

    assert head.quant_method.tie_weights(head, embeddings) is head
    assert not dict(head.named_parameters())
    load(embeddings, tensors, {EMBEDDING: None})
    embeddings.quant_method.process_weights_after_loading(embeddings)
    head.quant_method.process_weights_after_loading(head)

    x = integers(3, K)
    want = functional.pad(x @ matrix(tensors, EMBEDDING).T, (0, 32 - VOCABULARY))
    assert_same_bits(head.quant_method.apply(head, x), want)


def test_a_head_tied_to_plain_embeddings_shares_their_weight(plugin: Any, tmp_path: Path) -> None:
    tensors = random_model(up=(N, K)) | {f"{EMBEDDING}.weight": torch.zeros(VOCABULARY, K)}
    config = config_of(plugin, tmp_path, tensors)
    vocabulary = plugin.vllm["vllm.model_executor.layers.vocab_parallel_embedding"]
    embeddings = vocabulary.VocabParallelEmbedding(VOCABULARY, K, (0, VOCABULARY), 32)
    assert config.get_quant_method(embeddings, EMBEDDING) is None
    embeddings.quant_method = vocabulary.UnquantizedEmbeddingMethod()
    embeddings.weight = nn.Parameter(integers(32, K))
    head = vocabulary_layer(plugin, "ParallelLMHead", config, HEAD)
    buffer = head.parameter_buffer

    assert head.quant_method.tie_weights(head, embeddings) is head

    assert {*dict(head.named_parameters())} == {"weight"}
    assert head.weight is embeddings.weight
    assert not [*buffer.keys()]
    x = integers(3, K)
    assert_same_bits(head.quant_method.apply(head, x), x @ embeddings.weight.detach().T)


def random_experts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"mlp.experts.{expert}.{shard}.{suffix}": tensor
        for expert in range(EXPERTS)
        for shard, shape in MATRICES.items()
        for suffix, tensor in random_layer(*shape, generator).items()
    }


def load_experts(
    plugin: Any, config: Any, tensors: Mapping[str, Tensor], local: list[int], places: Tensor | None,
    rank: int = 0, world: int = 1, **settings: Any,
) -> Any:  # fmt: skip
    """Create the experts `local` of a layer, deliver all tensors, and finish them."""
    parallel = {"tp_rank": rank, "tp_size": world, "use_ep": places is not None}
    kind = plugin.vllm["vllm.model_executor.layers.fused_moe"].RoutedExperts
    layer = kind("mlp.experts", local, places, **parallel)
    for name, value in settings.items():
        setattr(layer, name, value)
    layer.quant_method = config.get_quant_method(layer, "mlp.experts")
    assert layer.quant_method.moe is layer.moe_config
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None
    layer.quant_method.create_weights(
        layer=layer,
        num_experts=len(local),
        hidden_size=H,
        unpadded_hidden_size=H,
        intermediate_size_per_partition=INNER // world,
        params_dtype=torch.float32,
        weight_loader=no_loader,
        global_num_experts=EXPERTS,
    )
    for name, tensor in tensors.items():
        expert, shard, suffix = name.removeprefix("mlp.experts.").split(".")
        param = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{suffix}")
        param.weight_loader(param, tensor, name, shard_id=shard, expert_id=int(expert))
    for _ in range(2):
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def sum_of_experts(tensors: Mapping[str, Tensor], x: Tensor, gate: Any, on_input: bool = False) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float64)
    for token, (numbers, factors) in enumerate(zip(IDS.tolist(), ROUTING.tolist(), strict=True)):
        for expert, factor in zip(numbers, factors, strict=True):
            w1, w3, w2 = (matrix(tensors, f"mlp.experts.{expert}.{shard}").double() for shard in MATRICES)
            inputs = x[token].double() * (factor if on_input else 1)
            total[token] += w2 @ (gate(w1 @ inputs) * (w3 @ inputs)) * (1 if on_input else factor)
    return total


def run_experts(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.quant_method.apply(layer, x, ROUTING, IDS, None, None)
    return y


IDS = torch.tensor([[0, 2], [3, 1], [1, 0], [2, 3]], dtype=torch.int32)
ROUTING = torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.25, 0.75], [0.5, 0.5]])
PLACES = ([2, 0], [1, 3])  # experts of two ranks, in the order of their local numbers


def assert_sums(
    got: Tensor, tensors: Mapping[str, Tensor], x: Tensor, gate: Any, on_input: bool = False
) -> None:
    """Compare with sums in float64, within the roundings of float32 of sums of absolute values.

    Sums of inputs are exact, so that the roundings are INNER additions and the steps of a gate and products,
    fewer than 8.
    """
    sizes = {name: tensor.abs() for name, tensor in tensors.items()}
    bound = (INNER + 8) * 2**-24 * sum_of_experts(sizes, x.abs(), torch.abs, on_input)
    assert bool(((got - sum_of_experts(tensors, x, gate, on_input)).abs() <= bound).all())


@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        ("silu", functional.silu),
        ("gelu", functional.gelu),
        ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
@pytest.mark.parametrize("on_input", [False, True])
def test_experts_on_one_rank(on_input: bool, activation: str, gate: Any, plugin: Any, tmp_path: Path) -> None:
    tensors, x = random_experts(), integers(4, H) / 8
    settings = {
        "activation": SimpleNamespace(value=activation),
        "apply_router_weight_on_input": on_input,
    }
    config = config_of(plugin, tmp_path, tensors)
    layer = load_experts(plugin, config, tensors, [*range(EXPERTS)], None, **settings)

    assert not dict(layer.named_parameters())
    assert_sums(run_experts(layer, x), tensors, x, gate, on_input)


def test_shares_of_experts_sum_to_all(plugin: Any, tmp_path: Path) -> None:
    tensors, x = random_experts(), integers(4, H) / 8
    config = config_of(plugin, tmp_path, tensors)
    shares = [load_experts(plugin, config, tensors, [*range(EXPERTS)], None, rank, 2) for rank in range(2)]

    total = sum((run_experts(layer, x) for layer in shares), torch.zeros_like(x))

    assert_sums(total, tensors, x, functional.silu)


def test_whole_experts_sum_to_all(plugin: Any, tmp_path: Path) -> None:
    tensors, x = random_experts(), integers(4, H) / 8
    config = config_of(plugin, tmp_path, tensors)
    total = torch.zeros_like(x)
    for local in PLACES:
        places = torch.tensor([local.index(e) if e in local else -1 for e in range(EXPERTS)])
        layer = load_experts(plugin, config, tensors, local, places)
        total += run_experts(layer, x)

    assert_sums(total, tensors, x, functional.silu)


def test_options_of_the_load_reach_experts(plugin: Any, tmp_path: Path) -> None:
    tensors = random_experts()
    options = {"target": None, "activations": "unquantized", "nonfinite": "allow"}
    config = config_of(plugin, tmp_path, tensors, qload=options)
    typed = load_experts(plugin, config, tensors, [*range(EXPERTS)], None).quant_method.typed

    assert {name: getattr(typed, name) for name in options} == options
    assert typed.logged is config.methods.loader.logged
    assert typed.prefix == "mlp.experts"


def test_parameters_take_no_memory_before_their_load(plugin: Any, tmp_path: Path) -> None:
    config = config_of(plugin, tmp_path, random_model(up__up_proj=(N, K)))
    layer = linear_layer(plugin, config, "up.up_proj", [N])

    sizes = {
        name: each.untyped_storage().nbytes() / each.element_size() for name, each in layer.named_parameters()
    }

    assert sizes
    assert max(sizes.values()) <= 1, sizes
