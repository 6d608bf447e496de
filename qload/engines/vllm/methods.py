"""vLLM's quantization methods of linear layers, heads, embeddings and experts.

vLLM pads a vocabulary before it splits it, so that a share may end in rows that no checkpoint has. Every rank
loads all rows of heads and embeddings, and keeps its own after the last tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from qload.engines.vllm.checkpoint import CheckpointNames
from qload.engines.vllm.weight_loading import (
    BIASES,
    Rows,
    apply_linear,
    expert_facts,
    finish_experts_when_loaded,
    finish_linear,
    finish_when_loaded,
    pad_logits,
)
from qload.loader import ConfiguredFormat
from qload.methods import CheckpointConfig, TypedExpertsMethod, TypedLinearMethod
from qload.parallel import Rank


class QloadLinearMethod(LinearMethodBase):
    """Quantization method of a linear layer.

    Parameters
    ----------
    typed
        qload's method, which registers and splits the parameters.
    names
        Tensor names of the checkpoint.
    """

    def __init__(self, typed: TypedLinearMethod, names: CheckpointNames) -> None:
        super().__init__()
        self.typed, self.names = typed, names

    def create_weights(self, layer: nn.Module, *sizes: Any, **attrs: Any) -> None:
        """Register a parameter for every tensor that `layer` may have, as `TypedLinearMethod` does."""
        attrs.pop("weight_loader", None)  # vLLM's splits by attributes, qload's by formats
        self.typed.create_weights(layer, *sizes, **attrs)
        finish_when_loaded(layer, self.typed, self.names)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Finish `layer`, unless its last tensor did; a missing tensor is an error of qload."""
        finish_linear(layer, self.typed)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x (..., K) -> this rank's (..., N), in the dtype of x, by the weight; `bias` (N,)."""
        return apply_linear(layer, x, bias)


class QloadVocabularyMethod(QuantizeMethodBase):
    """Base of the methods of heads and embeddings.

    Parameters
    ----------
    typed
        qload's method for the layer's formats.
    names
        Tensor names of the checkpoint.
    """

    def __init__(self, typed: TypedLinearMethod, names: CheckpointNames) -> None:
        super().__init__()
        self.typed, self.names = typed, names

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **attrs: Any) -> None:
        """Register a parameter for every tensor that `layer` may have, in the shape of all rows."""
        K, N = layer.embedding_dim, layer.org_vocab_size
        attrs.pop("weight_loader", None)
        self.typed.create_weights(layer, K, [N], K, N, params_dtype, **attrs)
        finish_when_loaded(layer, self.typed, self.names, rank_rows(layer))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Finish `layer`, unless its last tensor did."""
        finish_linear(layer, self.typed, rank_rows(layer))


def rank_rows(layer: Any) -> Rows:
    """Return the rows [start, stop) of a vocabulary on this rank."""
    return layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index


class QloadHeadMethod(QloadVocabularyMethod):
    """Quantization method of a head; padding rows of the vocabulary give 0."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute logits (..., this rank's rows, padded) of x (..., K), in the dtype of x; `bias` as many."""
        return pad_logits(layer.typed_linear(x), bias, layer.num_embeddings_per_partition)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Make `layer` a plain head over the weight of `embed_tokens`, without tensors of its own."""
        for slot in layer.parameter_buffer.slots.values():
            delattr(layer, slot.param_name)
        layer.parameter_buffer.close()
        layer.quant_method = PlainHeadMethod()
        return layer.quant_method.tie_weights(layer, embed_tokens)


class PlainHeadMethod(UnquantizedEmbeddingMethod):
    """Method of a plain head, which may be tied to quantized embeddings."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let `layer` multiply by the weight of `embed_tokens`."""
        if not isinstance(embed_tokens.quant_method, QloadEmbeddingMethod):
            return super().tie_weights(layer, embed_tokens)
        layer._parameters.pop("weight", None)
        layer.quant_method, layer.embedding_rows = embed_tokens.quant_method, embed_tokens.embedding_rows
        layer.typed_linear = None
        return layer


class QloadEmbeddingMethod(QloadVocabularyMethod):
    """Method of quantized embeddings, which are dequantized once, as a lookup reads single rows."""

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **attrs: Any) -> None:
        """Register the loaded parameters, and a buffer of plain rows, to which a head can be tied."""
        super().create_weights(layer, *sizes, params_dtype=params_dtype, **attrs)
        rows = torch.zeros(layer.num_embeddings_per_partition, layer.embedding_dim, dtype=params_dtype)
        layer.register_buffer("embedding_rows", rows, persistent=False)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantize the rows of `layer`, and free the quantized ones."""
        if getattr(layer, "typed_linear", self) is None:  # a second call
            return
        super().process_weights_after_loading(layer)
        rows = layer.typed_linear.typed.dequantize(layer.params_dtype)
        layer.embedding_rows[: rows.shape[0]].copy_(rows)
        layer.typed_linear = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the logits of a head tied to `layer`, of x (..., K), plus `bias`."""
        return functional.linear(x, layer.embedding_rows, bias)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Look up the embeddings (..., K) of tokens `input_` (...), counted from the first row of `layer`."""
        return functional.embedding(input_, layer.embedding_rows)


class QloadExpertsMethod(FusedMoEMethodBase):
    """Quantization method of the routed experts of a layer, split by tensor or by whole experts.

    Parameters
    ----------
    moe
        vLLM's config of the layer.
    formats
        Formats of the experts to try.
    names
        Tensor names of the checkpoint.
    config
        Options of the load: `target`, `activations` and `nonfinite`.
    """

    def __init__(
        self,
        moe: Any,
        formats: Sequence[ConfiguredFormat],
        names: CheckpointNames,
        config: CheckpointConfig,
    ) -> None:
        super().__init__(moe)
        self.formats, self.names, self.config = formats, names, config

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """Return None: `layer` is for none of vLLM's own kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for every tensor that an expert of `layer` has in any of the formats.

        CutError or DivideError, the same on every rank, for a format that cannot be split; ArgumentError for
        an unsupported computation inside the experts.
        """
        config, parallel = self.config, layer.moe_config.moe_parallel_config
        self.typed = TypedExpertsMethod(
            self.formats,
            layer.layer_name,
            expert_facts(layer),
            target=config.target,
            activations=config.activations,
            nonfinite=config.nonfinite,
            logged=config.loader.logged,
        )
        sizes = (num_experts, hidden_size, intermediate_size_per_partition)
        group = Rank(parallel.tp_rank, parallel.tp_size)
        self.typed.create_weights(layer, *sizes, params_dtype, group=group)
        finish_experts_when_loaded(layer, self.typed, self.names)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Finish `layer`, unless its last tensor did; a missing tensor is an error of qload."""
        self.typed.process_weights_after_loading(layer)
        for name in BIASES:
            layer._parameters.pop(name, None)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Apply this rank's experts of `layer` to x (T, H), in its dtype; vLLM sums over the ranks.

        `topk_weights`, `topk_ids`: (T, k). vLLM runs `shared_experts` on `shared_experts_input` itself.
        """
        return self.typed.apply(layer, x, topk_weights, topk_ids, layer.expert_map)
