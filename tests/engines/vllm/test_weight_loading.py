"""Layers that an engine fills tensor by tensor, as vLLM's are, without vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qload import MemoryStorage, Weights, loader_from_config
from qload.engines.vllm.checkpoint import CheckpointNames
from qload.engines.vllm.weight_loading import apply_linear, finish_linear, finish_when_loaded, pad_logits
from qload.errors import MissingTensorError
from qload.methods import TypedLinearMethod
from qload.testing import assert_same_bits
from tests.models.with_transformers.stored import FORMATS as STORED

GPTQ = STORED["gptq"]
K = 64


class Layer(nn.Module):
    """As vLLM's layers tell their rank."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size


def drawn(**outputs: int) -> dict[str, Tensor]:
    """Layers under `up.`, each of so many outputs, every one in an order of its own."""
    make = torch.Generator().manual_seed(0)
    found = {}
    for part, N in outputs.items():
        found |= {f"up.{part}.{suffix}": tensor for suffix, tensor in GPTQ.layer(N, K, make).items()}
    return found


def method(prefix: str) -> TypedLinearMethod:
    loader: Any = loader_from_config(dict(GPTQ.section))
    return TypedLinearMethod(loader.formats, prefix, target=None)


def means(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    weights = Weights(MemoryStorage(tensors), loader=loader_from_config(dict(GPTQ.section)))
    return weights.get_weights(name).dequantize()


def known(folder: Path, tensors: Mapping[str, Tensor]) -> CheckpointNames:
    save_file({**tensors}, folder / "model.safetensors")
    return CheckpointNames(str(folder))


def bring(layer: Any, tensors: Mapping[str, Tensor], ids: Mapping[str, Any]) -> list[bool]:
    """As vLLM's loaders do, by parameters looked up before; whether the layer was done after each."""
    params, done = dict(layer.named_parameters()), []
    for name, tensor in tensors.items():
        part, suffix = name.removeprefix("up.").split(".", 1)
        param = params[suffix]
        param.weight_loader(param, tensor, *[ids[part]] * (ids[part] is not None))
        done.append(hasattr(layer, "typed_linear"))
    return done


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 2), (1, 2)])
def test_parts_in_different_orders_are_multiplied_one_after_another(
    rank: int, world: int, tmp_path: Path
) -> None:
    tensors = drawn(gate_proj=64, up_proj=64)
    layer, typed = Layer(rank, world), method("up.gate_up_proj")
    share = 64 // world
    typed.create_weights(layer, K, [share, share], K, 128, torch.float32)
    finish_when_loaded(layer, typed, known(tmp_path, tensors))

    done = bring(layer, tensors, {"gate_proj": 0, "up_proj": 1})

    assert done == [False] * 7 + [True]
    x, rows = torch.randn(3, K), slice(rank * share, (rank + 1) * share)
    own = [means(tensors, f"up.{part}")[rows] for part in ("gate_proj", "up_proj")]
    bias = torch.arange(2.0 * share)
    want = x @ torch.cat(own).T
    assert torch.allclose(apply_linear(layer, x), want, rtol=0, atol=float(want.abs().max()) * K * 2**-24)
    assert_same_bits(
        apply_linear(layer, x, bias),
        torch.cat(
            [
                each(x, piece)
                for each, piece in zip(layer.typed_linear.linears, bias.split(share), strict=True)  # type: ignore[union-attr,operator]
            ],
            -1,
        ),
    )


def test_what_arrived_is_let_go_of(tmp_path: Path) -> None:
    tensors = drawn(o_proj=32)
    layer, typed = Layer(), method("up.o_proj")
    typed.create_weights(layer, K, [32], K, 32, torch.float32)
    finish_when_loaded(layer, typed, known(tmp_path, tensors))
    looked_up = dict(layer.named_parameters())

    assert bring(layer, tensors, {"o_proj": None})[-1]

    assert not dict(layer.named_parameters())
    assert all(param.numel() == 0 for param in looked_up.values())


def test_a_bias_may_come_later(tmp_path: Path) -> None:
    tensors = drawn(o_proj=32)
    layer, typed = Layer(), method("up.o_proj")
    typed.create_weights(layer, K, [32], K, 32, torch.float32)
    finish_when_loaded(layer, typed, known(tmp_path, tensors | {"up.o_proj.bias": torch.zeros(32)}))
    layer.bias = nn.Parameter(torch.full((32,), torch.nan))

    assert bring(layer, tensors, {"o_proj": None})[-1]
    assert [*layer._parameters] == ["bias"]


def test_a_layer_whose_files_are_unknown_is_finished_at_the_end() -> None:
    tensors = drawn(o_proj=32)
    layer, typed = Layer(), method("up.o_proj")
    typed.create_weights(layer, K, [32], K, 32, torch.float32)
    finish_when_loaded(layer, typed, CheckpointNames())

    assert not any(bring(layer, tensors, {"o_proj": None}))
    finish_linear(layer, typed)
    linear = layer.typed_linear
    finish_linear(layer, typed)

    assert layer.typed_linear is linear


def test_a_tensor_that_never_came_is_named() -> None:
    tensors = drawn(o_proj=32)
    del tensors["up.o_proj.scales"]
    layer, typed = Layer(), method("up.o_proj")
    typed.create_weights(layer, K, [32], K, 32, torch.float32)
    finish_when_loaded(layer, typed, CheckpointNames())
    bring(layer, tensors, {"o_proj": None})

    with pytest.raises(MissingTensorError, match=r"up\.o_proj\.scales"):
        finish_linear(layer, typed)


@pytest.mark.parametrize("rows", [(0, 24), (24, 40)])
def test_a_share_of_a_vocabulary_need_be_no_equal_one(rows: tuple[int, int], tmp_path: Path) -> None:
    tensors = drawn(head=40)
    layer, typed = Layer(int(rows[0] > 0), 2), method("up.head")
    typed.create_weights(layer, K, [40], K, 40, torch.float32)
    finish_when_loaded(layer, typed, known(tmp_path, tensors), rows)

    assert bring(layer, tensors, {"head": None})[-1]

    typed_weight: Any = layer.typed_linear.typed  # type: ignore[union-attr]
    assert_same_bits(typed_weight.dequantize(), means(tensors, "up.head")[slice(*rows)])


def head_of(folder: Path, rows: tuple[int, int], tensors: Mapping[str, Tensor]) -> tuple[Any, list[Any]]:
    """A head of 40 rows with those of one rank, and its parameters as they were before it was done."""
    layer, typed = Layer(int(rows[0] > 0), 2), method("up.head")
    typed.create_weights(layer, K, [40], K, 40, torch.float32)
    finish_when_loaded(layer, typed, known(folder, tensors), rows)
    looked_up = [*layer.parameters()]
    bring(layer, tensors, {"head": None})
    return layer, looked_up


def test_ranks_side_by_side_have_the_logits_of_the_whole_vocabulary(tmp_path: Path) -> None:
    tensors, x = drawn(head=40), torch.randn(3, K)
    shares = [head_of(tmp_path, rows, tensors)[0] for rows in ((0, 24), (24, 40))]

    whole = x @ means(tensors, "up.head").T
    made = torch.cat([apply_linear(each, x) for each in shares], -1)
    assert torch.allclose(made, whole, rtol=0, atol=float(whole.abs().max()) * K * 2**-24)


def test_a_rank_lets_go_of_the_rows_of_all_ranks(tmp_path: Path) -> None:
    layer, looked_up = head_of(tmp_path, (24, 40), drawn(head=40))

    assert looked_up
    assert not sum(param.untyped_storage().nbytes() for param in looked_up)
    assert not [*layer.parameter_buffer.keys()]


def test_a_bias_is_added_to_every_row_and_once() -> None:
    bias = torch.arange(4.0)

    assert pad_logits(torch.zeros(2, 3), bias, 4).tolist() == [bias.tolist()] * 2


def test_rows_that_pad_a_vocabulary_give_nothing() -> None:
    y = torch.ones(2, 3)

    assert pad_logits(y, None, 5).tolist() == [[1, 1, 1, 0, 0]] * 2
    assert pad_logits(y, torch.arange(5.0), 5).tolist() == [[1, 2, 3, 3, 4]] * 2
