"""A linear layer of vLLM's, filled by its loader, and cut, joined, repacked and multiplied by qload.

vLLM hands over whole tensors of the checkpoint, and of each a rank keeps its share. When the last of a layer
is there, the layer is repacked and lets go of what arrived: at no time is there more than the model, and one
layer twice. Where the files are not known, all layers are finished after the last tensor.
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

from qload.detect import Target
from qload.engines.vllm.checkpoint import CheckpointNames
from qload.engines.vllm.weight_loading import (
    ExpertArrivals,
    facts_of,
    finish,
    finish_experts,
    multiplied,
    padded,
    routed,
    unwatch_experts,
    watch,
    watch_experts,
)
from qload.kernels.declared import Activations
from qload.loader import ConfiguredFormat
from qload.loader.finite_scales import Nonfinite
from qload.methods import TypedLinearMethod
from qload.parallel import Rank


class QloadLinearMethod(LinearMethodBase):
    """What vLLM asks of a quantized linear layer.

    Parameters
    ----------
    typed
        The method that registers and cuts.
    names
        The tensors that the checkpoint has.
    """

    def __init__(self, typed: TypedLinearMethod, names: CheckpointNames) -> None:
        super().__init__()
        self.typed, self.names = typed, names

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for every tensor that `layer` may have, as `TypedLinearMethod` does."""
        extra_weight_attrs.pop("weight_loader", None)  # vLLM's cuts by tags, ours by the formats
        sizes = (input_size_per_partition, output_partition_sizes, input_size, output_size)
        self.typed.create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        watch(layer, self.typed, self.names)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Finish `layer`, where its last tensor has not done so; what is missing is an error of qload."""
        finish(layer, self.typed)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiplies x (..., K) -> (..., N) of this rank, in x's dtype, by `layer`'s weight; `bias` (N,)."""
        return multiplied(layer, x, bias)


class QloadVocabularyMethod(QuantizeMethodBase):
    """What heads and embeddings have in common.

    Parameters
    ----------
    typed
        The method of the layer's formats.
    names
        The tensors that the checkpoint has.
    """

    def __init__(self, typed: TypedLinearMethod, names: CheckpointNames) -> None:
        super().__init__()
        self.typed, self.names = typed, names

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **attrs: Any) -> None:
        """Register a parameter for every tensor that `layer` may have, in the shape of all rows."""
        K, N = layer.embedding_dim, layer.org_vocab_size
        attrs.pop("weight_loader", None)
        self.typed.create_weights(layer, K, [N], K, N, params_dtype, **attrs)
        watch(layer, self.typed, self.names, rows_of(layer))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Finish `layer`, where its last tensor has not done so."""
        finish(layer, self.typed, rows_of(layer))


def rows_of(layer: Any) -> tuple[int, int]:
    """The rows [start, stop) that this rank has of a vocabulary."""
    return layer.shard_indices.org_vocab_start_index, layer.shard_indices.org_vocab_end_index


class QloadHeadMethod(QloadVocabularyMethod):
    """A head, of which each rank multiplies by its rows; rows that pad the vocabulary give 0."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (..., rows of this rank, padding too) of x (..., K), in x's dtype; `bias` as many."""
        return padded(layer.typed_linear(x), bias, layer.num_embeddings_per_partition)

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let `layer` be a plain head over the vectors of `embed_tokens`; nothing is loaded for it."""
        for slot in layer.typed_arrivals.slots.values():
            delattr(layer, slot.param_name)
        layer.typed_arrivals.close()
        layer.quant_method = PlainHeadMethod()
        return layer.quant_method.tie_weights(layer, embed_tokens)


class PlainHeadMethod(UnquantizedEmbeddingMethod):
    """A plain head, which may be tied to embeddings that are stored quantized."""

    def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
        """Let `layer` multiply by the vectors of `embed_tokens`."""
        if not isinstance(embed_tokens.quant_method, QloadEmbeddingMethod):
            return super().tie_weights(layer, embed_tokens)
        layer._parameters.pop("weight", None)
        layer.quant_method, layer.embedding_rows = embed_tokens.quant_method, embed_tokens.embedding_rows
        layer.typed_linear = None
        return layer


class QloadEmbeddingMethod(QloadVocabularyMethod):
    """Embeddings that are stored quantized, dequantized once: a lookup reads single rows."""

    def create_weights(self, layer: Any, *sizes: Any, params_dtype: torch.dtype, **attrs: Any) -> None:
        """Register the plain rows beside what is loaded, so that a head can be tied to them."""
        super().create_weights(layer, *sizes, params_dtype=params_dtype, **attrs)
        rows = torch.zeros(layer.num_embeddings_per_partition, layer.embedding_dim, dtype=params_dtype)
        layer.register_buffer("embedding_rows", rows, persistent=False)  # which no checkpoint has

    def process_weights_after_loading(self, layer: Any) -> None:
        """Dequantize the rows of `layer`, and let go of the quantized ones."""
        if getattr(layer, "typed_linear", self) is None:  # done before
            return
        super().process_weights_after_loading(layer)
        own = layer.typed_linear.typed.dequantize(layer.params_dtype)
        layer.embedding_rows[: own.shape[0]].copy_(own)
        layer.typed_linear = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """What a head that is tied to `layer` puts out: logits of x (..., K), plus `bias`."""
        return functional.linear(x, layer.embedding_rows, bias)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """The vectors (..., K) of tokens `input_` (...), counted from the first row of `layer`."""
        return functional.embedding(input_, layer.embedding_rows)


class QloadExpertsMethod(FusedMoEMethodBase):
    """What vLLM asks of quantized experts.

    Parameters
    ----------
    moe
        vLLM's config of the layer.
    formats
        What the experts may be stored as.
    names
        The tensors that the checkpoint has.
    target, activations, nonfinite, logged
        As of `TypedLinearMethod`.
    """

    def __init__(
        self,
        moe: Any,
        formats: Sequence[ConfiguredFormat],
        names: CheckpointNames,
        *,
        target: Target | None,
        activations: Activations,
        nonfinite: Nonfinite,
        logged: set[str],
    ) -> None:
        super().__init__(moe)
        self.formats, self.names = formats, names
        self.target, self.activations, self.nonfinite = target, activations, nonfinite
        self.logged = logged

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: `layer` is for none of vLLM's own kernels."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for every tensor that an expert of `layer` may have.

        CutError or DivideError, the same on every rank, where the format cannot be cut so; ArgumentError for
        experts that do what qload has no product for.
        """
        layer.expert_facts, layer.params_dtype = facts_of(layer), params_dtype
        parallel = layer.moe_config.moe_parallel_config
        sizes, group = (
            (hidden_size, intermediate_size_per_partition),
            Rank(parallel.tp_rank, parallel.tp_size),
        )
        arrivals = ExpertArrivals(layer.layer_name, self.formats, sizes, group, params_dtype)
        layer.expert_arrivals = arrivals
        watch_experts(layer, arrivals, self.names, lambda: self._finish(layer))

    def process_weights_after_loading(self, layer: Any) -> None:
        """Finish `layer`, where its last tensor has not done so; what is missing is an error of qload."""
        self._finish(layer)
        unwatch_experts(layer)

    def _finish(self, layer: Any) -> None:
        finish_experts(
            layer, layer.expert_arrivals, self.target, self.activations, self.nonfinite, self.logged
        )

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """What the experts of `layer` here make of x (T, H), in its dtype; vLLM sums over the ranks.

        `topk_weights`, `topk_ids`: (T, k). vLLM runs `shared_experts` on `shared_experts_input` itself.
        """
        return routed(layer, x, topk_weights, topk_ids)
