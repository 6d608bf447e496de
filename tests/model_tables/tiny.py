"""Tiny models of any type of the file of tables, written as checkpoints."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.model_tables.draw import Changes, fields_of, make_config
from tests.model_tables.explore import attempt, find_base

DIVISORS = (64, 32, 16, 8, 4, 2)
SMALLEST = 16  # sizes from here on are divided
MAX_BYTES = 160 << 20


def tiny_changes(model_class: type[PreTrainedModel], seed: int) -> Changes:
    """Return changes that make a model of a type small: each size divided as far as the class permits.

    Seed 0 keeps all else; another seed inverts some booleans.
    """
    chance = random.Random(seed)
    fields = fields_of(model_class.config_class)
    changes: dict[str, Any] = dict(find_base(model_class, fields))
    sizes = [one for one in fields if type(one.default) is int and one.default >= SMALLEST]
    for one in sorted(sizes, key=lambda one: -one.default):
        value = changes.get(one.name, one.default)
        for divisor in DIVISORS if value >= SMALLEST else ():
            if value % divisor == 0 and attempt(model_class, {**changes, one.name: value // divisor}):
                changes[one.name] = value // divisor
                break
    for one in fields if seed else ():
        if isinstance(one.default, bool) and chance.random() < 0.5:
            inverted = {**changes, one.name: not one.default}
            if attempt(model_class, inverted):
                changes = inverted
    return changes


def write_tiny(model_class: type[PreTrainedModel], seed: int, folder: Path) -> PreTrainedConfig:
    """Write a tiny model of a type with random values; ValueError for one of too many bytes."""
    config = make_config(model_class.config_class, tiny_changes(model_class, seed))
    with torch.device("meta"):
        size = sum(tensor.nbytes for tensor in model_class(config).state_dict().values())
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes are more than {MAX_BYTES}")
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for tensor in model.parameters():  # a norm of zeros is a finding
            if tensor.is_floating_point():
                tensor.normal_()
    model.save_pretrained(folder)
    return model.config


def class_of(name: str) -> type[PreTrainedModel]:
    """Return a class of transformers by its name."""
    found: type[PreTrainedModel] = getattr(transformers, name)
    return found
