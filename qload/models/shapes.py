"""Whether the matrices of a checkpoint have the sizes that a model's config says, before any is read."""

from collections.abc import Sequence

from qload.errors import MissingTensorError, ShapeError
from qload.weights import Weights


def check_matrix(
    weights: Weights,
    prefixes: Sequence[str] | str,
    sizes: Sequence[int],
    features: int,
    *,
    padded: bool = False,
) -> None:
    """ShapeError where a layer is not (N, K) of the config.

    `prefixes`: one for each of `sizes`, which are N, or one name that holds all of them. `features`: K.
    `padded`: whether it may have more outputs than the config says, as padded vocabularies have.
    """
    fused = isinstance(prefixes, str)
    named = [(prefixes, sum(sizes))] if isinstance(prefixes, str) else list(zip(prefixes, sizes, strict=True))
    for prefix, size in named:
        shape = weights.loader.shape(weights, prefix)
        right = shape == (size, features) or (padded and shape[0] >= size and shape[1] == features)
        if not right:
            parts = f" = {' + '.join(map(str, sizes))}" if fused and len(sizes) > 1 else ""
            more = " or more" if padded else ""
            raise ShapeError(prefix, f"({size}{more}, {features}), as the config says{parts}", shape)


def check_biases(weights: Weights, prefixes: Sequence[str] | str, promised: frozenset[str]) -> None:
    """MissingTensorError where the config promises a bias that is not stored."""
    for prefix in [prefixes] if isinstance(prefixes, str) else prefixes:
        name = f"{prefix}.bias"
        if prefix.rpartition(".")[2] in promised and not weights.has_tensor(name):
            error: MissingTensorError = weights.missing(name, "the config says that there is one")
            raise error
