"""Embedding and head of a tensor-parallel model, with unequal shares of the vocabulary."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.detect import DefaultWeightsLoader
from qload.errors import ShapeError
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.loader import Part
from qload.methods.checkpoint_linear import (
    LinearFactory,
    LoadedLinear,
    build_linear,
    check_bias_tensor,
    load_linear,
    read_bias,
)
from qload.methods.layers import ColumnParallelLinear
from qload.parallel import Collectives, collectives_of
from qload.spec import Layer, Weight, named
from qload.weights import Weights


class VocabParallelEmbedding(nn.Module):
    """Embedding with a run of rows on each rank; every rank returns the vectors of all tokens.

    Parameters
    ----------
    weight
        This rank's rows (rows, H).
    start
        Number of the first row.
    size
        Rows on all ranks; None: as many as on this one.
    collectives
        The ranks; None: this rank has all rows.
    """

    def __init__(
        self,
        weight: Tensor,
        start: int = 0,
        size: int | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.start: int = start
        self.size: int = weight.shape[0] if size is None else size
        self.collectives: Collectives | None = collectives

    @classmethod
    def load(cls, weights: Weights, prefix: str) -> Self:
        """Load this rank's rows of the embedding `prefix` of `weights`.

        A rank has ceil(N / ranks) rows, rounded up to the next cut of the format; the last may have fewer.
        Quantized rows are dequantized; plain rows stay plain with any loader. DivideError if a rank would
        have no row.
        """
        group = weights.process_group
        ranks = None if group.size() == 1 else collectives_of(group)
        loaded = _load_rows(weights, prefix)
        if isinstance(loaded, UnquantizedWeight):
            rows = loaded.weight
        else:
            rows = loaded.dequantize(weights.dtype or torch.float32)
        count, size = rows.shape[0], loaded.layer.whole[0]
        start = group.rank() * count if group.rank() < group.size() - 1 else size - count
        return cls(rows, start, size, ranks)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the vectors (..., H) of tokens `ids` (...), integers below the size of the vocabulary."""
        rows = self.get_buffer("weight")
        if self.collectives is None:
            return functional.embedding(ids, rows)
        local = ids - self.start
        on_other_rank = (local < 0) | (local >= rows.shape[0])
        vectors = functional.embedding(local.masked_fill(on_other_rank, 0), rows)
        return self.collectives.summed(vectors.masked_fill(on_other_rank[..., None], 0))

    def extra_repr(self) -> str:
        """Return this rank's rows."""
        rows, features = self.get_buffer("weight").shape
        return f"rows {self.start} to {self.start + rows}, features={features}"


class ParallelLMHead(ColumnParallelLinear):
    """Last layer, with a run of outputs on each rank; every rank returns the logits of the whole vocabulary.

    A head without `load` is an ordinary `ColumnParallelLinear`.
    """

    vocab: int | None = None  # logits of a loaded head
    block: int = 0  # outputs of every rank but the last, which may have fewer

    @classmethod
    def load(  # type: ignore[override]  # a vocabulary with unequal shares
        cls,
        weights: Weights,
        prefix: str,
        *,
        vocab: int,
        tied_to: VocabParallelEmbedding | str | None = None,
        make: LinearFactory | None = None,
    ) -> Self:
        """Load this rank's outputs of the head `prefix` of `weights`, in any format, and of its bias.

        A rank has ceil(N / ranks) outputs, rounded up to the next cut of the format; the last may have fewer.
        DivideError if a rank would have none, ShapeError for a head with fewer than `vocab` outputs; further
        outputs are padding, without logits.

        Parameters
        ----------
        weights, prefix
            The checkpoint, and the name of the layer.
        vocab
            Number of logits.
        tied_to
            Embedding, or its prefix, to use as the head if no tensor of the head is stored. None: the head
            has its own tensors.
        make
            As in `ReplicatedLinear.load`.
        """
        group = weights.process_group
        ranks = None if group.size() == 1 else collectives_of(group)
        if tied_to is None or _is_stored(weights, prefix):
            _check_vocabulary(prefix, weights.loader.shape(weights, prefix), vocab)
            loaded = load_linear(weights, [Part(prefix, short=True)], "N", make)
        else:
            loaded = _load_tied(weights, prefix, vocab, tied_to, make)
        layer = cls._from_loaded(weights, prefix, loaded)
        count, last = loaded.shape[0], group.size() - 1
        layer.block = count if group.rank() < last or not last else (loaded.whole[0] - count) // last
        layer.vocab, layer.collectives = vocab, ranks
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (..., K) -> logits (..., vocab) in its dtype; without `load`, this rank's outputs."""
        y = self.quant_method.apply(self, x, self.bias)
        if self.collectives is not None:
            y = self.collectives.gathered(functional.pad(y, (0, self.block - y.shape[-1])))
        return y[..., : self.vocab]


def _is_stored(weights: Weights, prefix: str) -> bool:
    """Return whether a layer has a tensor of its own, in any format of the loader."""
    suffixes = {suffix for fmt in weights.loader.formats for suffix in fmt.suffixes}
    return any(weights.has_tensor(named(prefix, suffix)) for suffix in {"weight", *suffixes})


def _load_rows(weights: Weights, prefix: str) -> Weight:
    """Load this rank's rows of an embedding in their stored format."""
    part = Part(prefix, short=True)
    if weights.loader.describe(weights, prefix).format.weight_type.plain:
        return DefaultWeightsLoader().load(weights, [part], "N")
    return weights.loader.load(weights, [part], "N")


def _load_tied(
    weights: Weights,
    prefix: str,
    vocab: int,
    tied_to: VocabParallelEmbedding | str,
    make: LinearFactory | None,
) -> LoadedLinear:
    """Load an embedding as a head, in the format of the embedding."""
    if isinstance(tied_to, str):
        layer = weights.loader.describe(weights, tied_to)
        if not layer.format.weight_type.plain:
            _check_vocabulary(tied_to, (layer.N, layer.K), vocab)
            return load_linear(weights, [Part(tied_to, short=True)], "N", make)
        tied_to = VocabParallelEmbedding.load(weights, tied_to)
    weight = tied_to.get_buffer("weight")
    rows, features = weight.shape
    _check_vocabulary(prefix, (tied_to.size, features), vocab)
    share = Layer((rows,), features, (tied_to.size, features), prefix)
    typed = UnquantizedWeight(config=UnquantizedConfig(), layer=share, weight=weight)
    part = Part(prefix, 0, tied_to.size)
    has_bias = check_bias_tensor(weights, prefix, tied_to.size)
    bias = read_bias(weights, [part], typed, "N") if has_bias else None
    return build_linear(weights, [(typed, bias)], make)


def _check_vocabulary(prefix: str, shape: tuple[int, int], vocab: int) -> None:
    """Raise ShapeError for fewer rows than tokens."""
    if shape[0] < vocab:
        raise ShapeError(prefix, f"(N, {shape[1]}) = (N, K), N at least {vocab}, one for each token", shape)
