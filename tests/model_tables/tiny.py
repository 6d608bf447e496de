"""Tiny models of any type of the file of tables, written as checkpoints."""

import random
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tests.model_tables.draw import EXPERTS, Changes, Field, fields_of, make_config
from tests.model_tables.explore import attempt, find_base

DIVISORS = (256, 128, 64, 32, 16, 8, 4, 3, 2)
SMALLEST = 16  # sizes from here on are divided
MAX_BYTES = 160 << 20
GROUP = 16  # values of a matrix that share a scale
HEADS = re.compile(r"\w*heads|n_head")
LENGTH = re.compile(r"\w*(position|vocab|length|ctx)\w*")
FEW_HEADS, FEW_EXPERTS = 2, 4
INITIAL = 0.25  # deviation of vectors from their first values


def tiny_changes(model_class: type[PreTrainedModel], seed: int) -> Changes:
    """Return changes that make a model of a type small: each size divided as far as the class permits.

    Sizes of matrices are multiples of a group where they can be. Seed 0 keeps all else; another seed inverts
    some booleans.
    """
    chance = random.Random(seed)
    fields = fields_of(model_class.config_class)
    changes: dict[str, Any] = dict(find_base(model_class, fields))
    sizes = [one for one in fields if type(one.default) is int and one.default >= SMALLEST]
    for one in sorted(sizes, key=lambda one: -one.default):
        for value in smaller(one, changes.get(one.name, one.default)):
            if attempt(model_class, {**changes, one.name: value}):
                changes[one.name] = value
                break
    for one in fields if seed else ():
        if isinstance(one.default, bool) and chance.random() < 0.5:
            inverted = {**changes, one.name: not one.default}
            if attempt(model_class, inverted):
                changes = inverted
    return changes


def smaller(one: Field, value: int) -> list[int]:
    """Return quotients of a size: multiples of a group before others, and the smallest of these first."""
    least, unit = 2 * GROUP, GROUP
    if EXPERTS.fullmatch(one.leaf):
        least, unit = FEW_EXPERTS, 1
    elif HEADS.fullmatch(one.leaf):
        least, unit = FEW_HEADS, 1
    elif LENGTH.fullmatch(one.leaf):
        least, unit = 4 * GROUP, 1
    values = sorted(value // divisor for divisor in DIVISORS if value % divisor == 0)
    values = [quotient for quotient in values if quotient >= least]
    return sorted(values, key=lambda quotient: quotient % unit > 0)


def tiny_config(model_class: type[PreTrainedModel], seed: int = 0) -> PreTrainedConfig:
    """Return the config of a tiny model of a type; ValueError for one of too many bytes."""
    config = make_config(model_class.config_class, tiny_changes(model_class, seed))
    with torch.device("meta"):
        size = sum(tensor.nbytes for tensor in model_class(config).state_dict().values())
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes are more than {MAX_BYTES}")
    return config


def fill(model: PreTrainedModel, seed: int) -> None:
    """Draw all parameters, such that outputs of all layers are of one size; none keeps its first values."""
    draw = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=draw)

    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point() and tensor.ndim > 1:
                tensor.copy_(drawn(tensor) * tensor.shape[-1] ** -0.5)
            elif tensor.is_floating_point():  # a norm of zeros is a finding
                tensor += drawn(tensor) * INITIAL


def write_tiny(model_class: type[PreTrainedModel], seed: int, folder: Path) -> PreTrainedConfig:
    """Write a tiny model of a type with random values; ValueError for one of too many bytes."""
    torch.manual_seed(seed)  # of buffers
    model = model_class(tiny_config(model_class, seed))
    fill(model, seed)
    model.save_pretrained(folder)
    return model.config


def class_of(name: str) -> type[PreTrainedModel]:
    """Return a class of transformers by its name."""
    found: type[PreTrainedModel] = getattr(transformers, name)
    return found
