"""Indexer of DeepSeek V3.2: the choice of the keys that a token attends to, before attention.

    score of a key = sum over index heads of weight * relu(query . key)

Each token attends to the visible keys with the `index_topk` largest scores. All index heads share one key per
token, which the cache stores. Positive factors of the scores, which do not change their order, are left out.
Source: `modeling_deepseek_v32.py` of transformers 5.23.0.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear

from qload.methods import ReplicatedLinear
from qload.methods.checkpoint_linear import LinearFactory
from qload.models.config import IndexerConfig
from qload.models.kv_cache import PagedCache, Step, visible_keys
from qload.models.norm import load_tensor
from qload.models.rope import Rope
from qload.models.stored_layers import check_matrix
from qload.weights import Weights

NORM_EPS = 1e-6
MAX_PRODUCTS = 1 << 26  # of queries and keys at a time: 256 MiB


class Indexer(nn.Module):
    """Indexer of one layer, the same on every rank.

    Parameters
    ----------
    weights, prefix
        Weights of the model, and the prefix of the indexer; ShapeError for other sizes.
    config
        Sizes of the indexer.
    features, q_rank
        Sizes of the hidden state, and of the compressed vector of queries.
    rope
        Rotary embedding of the first elements of each head, in halves.
    make
        Creates the linear modules; None: those of the weights.
    """

    k_norm: Tensor
    k_norm_bias: Tensor
    weights_proj: Tensor

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: IndexerConfig,
        features: int,
        q_rank: int,
        rope: Rope,
        make: LinearFactory | None = None,
    ) -> None:
        super().__init__()
        self.config, self.rope = config, rope
        queries, key, weighting = (f"{prefix}.{name}" for name in ("wq_b", "wk", "weights_proj"))
        check_matrix(weights, queries, [config.heads * config.head_size], q_rank)
        check_matrix(weights, key, [config.head_size], features)
        check_matrix(weights, weighting, [config.heads], features)
        self.wq_b = ReplicatedLinear.load(weights, queries, make=make)
        self.wk = ReplicatedLinear.load(weights, key, make=make)
        for name, suffix in (("k_norm", "weight"), ("k_norm_bias", "bias")):
            tensor = load_tensor(weights, f"{prefix}.k_norm.{suffix}", (config.head_size,))
            self.register_buffer(name, tensor)
        self.register_buffer("weights_proj", weights.get_weights(weighting).dequantize(torch.float32))

    def forward(
        self, x: Tensor, compressed: Tensor, step: Step, cache: PagedCache, layer: int
    ) -> Tensor | None:
        """Write the index keys of the tokens x (T, H), and return a bias of attention scores (S, 1, Q, L).

        0 for a chosen key, else -inf; None where `top_k` keys are all. `compressed`: (T, q_rank).
        """
        sizes = self.config
        key = layer_norm(self.wk(x), (sizes.head_size,), self.k_norm, self.k_norm_bias, NORM_EPS)
        cache.write_index(layer, step.slots, self._rotate(key[:, None], step)[:, 0])
        count = step.pages.shape[1] * cache.page_size
        if count <= sizes.top_k:
            return None
        shape = step.sequences, step.new, sizes.heads
        queries = self._rotate(self.wq_b(compressed).view(x.shape[0], sizes.heads, -1), step)
        scores = index_scores(
            queries.view(*shape, -1),
            linear(x.float(), self.weights_proj).view(shape),
            cache.read_index(layer, step.pages),
        )
        positions = step.positions.view(shape[:2])
        hidden = step.kept(("hidden", count), lambda: ~visible_keys(positions, count, None, None))
        chosen = scores.masked_fill_(hidden, float("-inf")).topk(sizes.top_k, dim=-1).indices
        bias = torch.full(scores.shape, float("-inf"), dtype=x.dtype, device=x.device)
        return bias.scatter_(-1, chosen, 0).masked_fill_(hidden, float("-inf"))[:, None]

    def _rotate(self, heads: Tensor, step: Step) -> Tensor:
        """Rotate the first elements of `heads` (T, heads, head size), in halves."""
        cos, sin = step.kept(self.rope, lambda: self.rope(step.positions))
        return self.rope.turn(heads, cos, sin, pairs=False)


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Compute scores (S, Q, L) in float32: the sums over heads of weights times positive products.

    `queries`: (S, Q, heads, D); `weights`: (S, Q, heads); `keys`: (S, L, D). A limited number of queries is
    multiplied at a time.
    """
    heads, columns = queries.shape[2], keys.float().transpose(1, 2)
    rows = max(1, MAX_PRODUCTS // (queries.shape[0] * heads * keys.shape[1]))
    parts = (torch.split(tensor.float(), rows, 1) for tensor in (queries, weights))
    return torch.cat(
        [
            (weight[:, :, None] @ (query.flatten(1, 2) @ columns).relu_().unflatten(1, (-1, heads)))[:, :, 0]
            for query, weight in zip(*parts, strict=True)
        ],
        1,
    )
