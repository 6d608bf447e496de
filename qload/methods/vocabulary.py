"""The two ends of a model: a rank's rows of the vocabulary, which the ranks need not divide."""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from qload.detect import DefaultWeightsLoader
from qload.errors import ShapeError
from qload.formats import UnquantizedConfig, UnquantizedWeight
from qload.loader import Part
from qload.methods.biases import check_bias, read_bias
from qload.methods.layers import ColumnParallelLinear
from qload.methods.loaded import LinearFactory, LoadedLinear, load_linear, made_linear
from qload.parallel import Collectives, collectives_of
from qload.spec import Layer, Weight, named
from qload.weights import Weights


class VocabParallelEmbedding(nn.Module):
    """The vectors of a vocabulary, of which a rank has a run of rows; every rank gets those of all tokens.

    Parameters
    ----------
    weight
        (rows, H): this rank's.
    start
        The first of them.
    size
        How many rows there are on all ranks; None: as many as here.
    collectives
        The ranks; None: this one has all rows.
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
        """This rank's rows of the embedding that `weights` has under `prefix`.

        Of ceil(N / ranks) rows, rounded up to where the format may be cut; the last rank may have fewer.
        What is stored quantized is dequantized, and nothing is quantized here, whatever the loader does.
        DivideError where a rank would have no row.
        """
        group = weights.process_group
        ranks = None if group.size() == 1 else collectives_of(group)
        loaded = _rows(weights, prefix)
        if isinstance(loaded, UnquantizedWeight):
            rows = loaded.weight
        else:
            rows = loaded.dequantize(weights.dtype or torch.float32)
        here, size = rows.shape[0], loaded.layer.whole[0]
        start = group.rank() * here if group.rank() < group.size() - 1 else size - here
        return cls(rows, start, size, ranks)

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors (..., H) of tokens `ids` (...), integers below the vocabulary's size, on every rank."""
        rows = self.get_buffer("weight")
        if self.collectives is None:
            return functional.embedding(ids, rows)
        places = ids - self.start
        elsewhere = (places < 0) | (places >= rows.shape[0])
        found = functional.embedding(places.masked_fill(elsewhere, 0), rows)
        return self.collectives.summed(found.masked_fill(elsewhere[..., None], 0))

    def extra_repr(self) -> str:
        """This rank's rows."""
        rows, features = self.get_buffer("weight").shape
        return f"rows {self.start} to {self.start + rows}, features={features}"


class ParallelLMHead(ColumnParallelLinear):
    """The last layer, of whose outputs a rank has a run; every rank gets the logits of the whole vocabulary.

    One that an engine made is as any other `ColumnParallelLinear`.
    """

    vocab: int | None = None  # logits of a head that was loaded
    block: int = 0  # outputs of every rank but the last, which may have fewer

    @classmethod
    def load(  # type: ignore[override]  # a vocabulary, whose shares may be uneven
        cls,
        weights: Weights,
        prefix: str,
        *,
        vocab: int,
        tied_to: VocabParallelEmbedding | str | None = None,
        make: LinearFactory | None = None,
    ) -> Self:
        """This rank's outputs of the head that `weights` has under `prefix`, of any format, and of its bias.

        Of ceil(N / ranks) outputs, rounded up to where the format may be cut; the last rank may have fewer.
        DivideError where a rank would have none, ShapeError where the head is of fewer than `vocab`; what it
        has more is padding, and left out of the logits.

        Parameters
        ----------
        weights, prefix
            Where it is.
        vocab
            How many logits there are.
        tied_to
            The embedding, or its prefix, whose rows are the head where no tensor of its own is stored. None:
            the head has its own.
        make
            As of `ReplicatedLinear.load`.
        """
        group = weights.process_group
        ranks = None if group.size() == 1 else collectives_of(group)
        if tied_to is None or _is_stored(weights, prefix):
            _check_size(prefix, weights.loader.shape(weights, prefix), vocab)
            loaded = load_linear(weights, [Part(prefix, short=True)], "N", make)
        else:
            loaded = _tied(weights, prefix, vocab, tied_to, make)
        layer = cls._around(weights, prefix, loaded)
        here, last = loaded.shape[0], group.size() - 1
        layer.block = here if group.rank() < last or not last else (loaded.whole[0] - here) // last
        layer.vocab, layer.collectives = vocab, ranks
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """X (..., K) -> logits (..., vocab), in x's dtype; of a head that an engine made, this rank's."""
        y = self.quant_method.apply(self, x, self.bias)
        if self.collectives is not None:
            y = self.collectives.gathered(functional.pad(y, (0, self.block - y.shape[-1])))
        return y[..., : self.vocab]


def _is_stored(weights: Weights, prefix: str) -> bool:
    """Whether there is a tensor of a layer's own, in any format that its loader knows."""
    known = (suffix for fmt in weights.loader.formats for spec in fmt.specs() for suffix in spec.suffixes)
    return any(weights.has_tensor(named(prefix, suffix)) for suffix in {"weight", *known})


def _rows(weights: Weights, prefix: str) -> Weight:
    """This rank's rows of an embedding as they are stored."""
    part = Part(prefix, short=True)
    if weights.loader.describe(weights, prefix).format.weight_type.plain:
        return DefaultWeightsLoader().load(weights, [part], "N")
    return weights.loader.load(weights, [part], "N")


def _tied(
    weights: Weights,
    prefix: str,
    vocab: int,
    tied_to: VocabParallelEmbedding | str,
    make: LinearFactory | None,
) -> LoadedLinear:
    """A head that is an embedding: quantized as that is stored, and plain where that is."""
    if isinstance(tied_to, str):
        layer = weights.loader.describe(weights, tied_to)
        if not layer.format.weight_type.plain:
            _check_size(tied_to, (layer.N, layer.K), vocab)
            return load_linear(weights, [Part(tied_to, short=True)], "N", make)
        tied_to = VocabParallelEmbedding.load(weights, tied_to)
    weight = tied_to.get_buffer("weight")
    rows, features = weight.shape
    _check_size(prefix, (tied_to.size, features), vocab)
    placed = Layer((rows,), features, (tied_to.size, features), prefix)
    typed = UnquantizedWeight(config=UnquantizedConfig(), layer=placed, weight=weight)
    part = Part(prefix, 0, tied_to.size)
    biased = check_bias(weights, prefix, tied_to.size)
    bias = read_bias(weights, [part], typed, "N") if biased else None
    return made_linear(weights, [(typed, bias)], make)


def _check_size(prefix: str, shape: tuple[int, int], vocab: int) -> None:
    if shape[0] < vocab:
        raise ShapeError(prefix, f"(N, {shape[1]}) = (N, K), N at least {vocab}, one for each token", shape)
