"""The two ends of a model in vLLM: heads in any format, and embeddings that are stored quantized.

vLLM pads a vocabulary before it shares it out, so that shares may end in rows that no checkpoint has. Every
rank is handed all rows, of which it keeps its own once the last tensor is there.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from qload.engines.vllm.filling import finish, padded, watch
from qload.engines.vllm.names import CheckpointNames
from qload.methods import TypedLinearMethod


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
