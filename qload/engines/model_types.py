"""Sizes of a model of any type: of a decoder of qload, else of a class of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from os import PathLike
from typing import Any

import torch

from qload.errors import ConfigError
from qload.models import TextConfig, text_config
from qload.storage import locate

GENERATION = "qload.engines.transformers.generation"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that another program computes, by its config.

    Attributes
    ----------
    type
        The `model_type`.
    program
        The program, with its version.
    layers, hidden, vocab, positions
        Number of decoder layers, hidden size, size of the vocabulary, and largest length of a sequence.
    dtype
        Of activations, by the config; None without one.
    """

    type: str
    program: str
    layers: int
    hidden: int
    vocab: int
    positions: int
    dtype: torch.dtype | None


def sizes_of_any_type(path: str | PathLike[str], config: Mapping[str, Any]) -> TextConfig | ModelSizes:
    """Read the config of a decoder of qload, or the sizes of a model that transformers computes.

    `config`: the whole `config.json` of the checkpoint at `path`. ConfigError for a `model_type` of neither.
    """
    try:
        return text_config(config)
    except ConfigError as error:
        if not error.key.endswith("model_type") or locate(path).is_gguf:
            raise
        try:
            generation = import_module(GENERATION)
        except ImportError:
            remedy = "pip install 'qload-weights[transformers]' runs the other types that transformers has"
            raise replace(error, hint=remedy) from None
        sizes: ModelSizes | None = generation.read_sizes(path, str(config.get("model_type")))
        if sizes is None:
            raise
        return sizes
