"""Random small configs of a model type, and the values of the config's fields."""

import importlib
import inspect
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from transformers import PreTrainedConfig
from transformers.configuration_utils import ALLOWED_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES

LAYERS = re.compile(
    r"(num|n)_(hidden_|decoder_|encoder_|text_|vision_|\w+_)?layers?|depth|((en|de)coder_)?layers"
)
EXPERTS = re.compile(r"(num|n)_(\w+_)?experts|moe_num_experts")
SKIPPED = re.compile(
    r"\w*token(_id|_index|_ids)?|\w*dropout\w*|\w*_eps|\w+_id|chunk_size\w*|problem_type|dtype|add_cross_attention"
)
READ = re.compile(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)"')
CONDITION = r"if (?:not )?[\w.]*\b{0}(?::| >| and | or )"  # of tensors, on a size above 0
NONE_OF = re.compile(r"(num|n)_\w*(experts?|shared|predict)\w*|\w*(shared|latent|lora)\w*|\w+_rank")
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")
VOCABULARY_MAP = "vocabulary_map"  # tokens of images, without a default
FEW_LAYERS, FEW_EXPERTS, SMALL = 4, 8, 16
LAYER_COUNTS = (2, 5, 8)
GIVEN = (2, 4, 64, 96, 128)  # values for a field without a default
SIZE_NAME = re.compile(r"dim|size|num|rank|heads|layers|length|width|experts")
BASE = frozenset(item.name for item in fields(PreTrainedConfig)) - {"tie_word_embeddings"}

Changes = Mapping[str, Any]  # dotted name of a field -> value


@dataclass
class Field:
    """A field of a config: dotted name, default in the class, and values for draws."""

    name: str
    default: Any
    values: list[Any] = field(default_factory=list)
    per_layer: bool = False
    kinds: tuple[Any, ...] = ()  # members of a list with one for each layer

    @property
    def leaf(self) -> str:
        """Name in its section."""
        return self.name.rpartition(".")[2]

    def draw(self, chance: random.Random, layers: int) -> Any:
        """Draw one of the values; a list is drawn for a number of layers."""
        if self.per_layer and self.kinds:
            return [chance.choice(self.kinds) for _ in range(layers)]
        if self.per_layer:
            return [layer for layer in range(layers) if chance.random() < 0.5]
        if None in self.values and chance.random() < 0.5:
            return None
        return chance.choice(self.values)


def flatten(config: Mapping[str, Any], lead: str = "") -> dict[str, Any]:
    """Return the fields of nested configs by dotted name, and the length of a list under `name[]`."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and (not lead or "." not in lead.rstrip(".")):
            flat |= flatten(value, f"{lead}{name}.")
        else:
            flat[f"{lead}{name}"] = value
            if isinstance(value, list):
                flat[f"{lead}{name}[]"] = len(value)
    return flat


@cache
def default_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the config with all defaults."""
    return config_class()


def make_config(config_class: type[PreTrainedConfig], changes: Changes) -> PreTrainedConfig:
    """Build a config with changed fields; a section keeps the type of the default config."""
    sections: dict[str, Any] = {}
    for name, value in changes.items():
        section, dot, leaf = name.partition(".")
        if not dot:
            sections[name] = value
            continue
        kind = getattr(default_config(config_class), section).model_type
        own = sections.setdefault(section, {"model_type": kind})
        own[leaf] = value
    return config_class(**sections)


def sections_of(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield a config and the configs in it, with the lead of their fields' names."""
    yield "", config
    for name in sorted(type(config).sub_configs or {}):
        section = getattr(config, name, None)
        if isinstance(section, PreTrainedConfig):
            yield f"{name}.", section


def text_section(config: PreTrainedConfig) -> str:
    """Return the name of the section with the text model; empty for the config itself."""
    text = config.get_text_config()
    return next((lead.removesuffix(".") for lead, section in sections_of(config) if section is text), "")


def source_of(config: PreTrainedConfig) -> str:
    """Return the source of a config's models; empty without one module of models."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    try:
        return inspect.getsource(importlib.import_module(name))
    except ImportError:
        return ""


def fields_of(config_class: type[PreTrainedConfig]) -> list[Field]:
    """Fields of a config class and of its sections, with values to try.

    A model may read fields that its class does not declare: `getattr(config, "head_dim", ...)`.
    """
    found = []
    default = config_class()
    skipped = BASE | {*(type(default).sub_configs or ())}
    for lead, section in sections_of(default):
        source = source_of(section)
        declared = set()
        for item in fields(type(section)):
            declared.add(item.name)
            if item.name in skipped or SKIPPED.fullmatch(item.name):
                continue
            one = Field(f"{lead}{item.name}", item.default)
            present = section.__dict__.get(item.name)
            one.values = list(_values(one, str(item.type), present, source))
            found.append(one)
        for name in dict.fromkeys(READ.findall(source)):
            if name not in declared and name not in skipped and not SKIPPED.fullmatch(name):
                values = [96, 64] if SIZE_NAME.search(name) else [True]
                found.append(Field(f"{lead}{name}", None, values))
    return found


def _values(one: Field, hint: str, present: Any, source: str) -> Iterator[Any]:
    if isinstance(one.default, bool) or ("bool" in hint and one.default is None):
        yield not one.default
    elif isinstance(one.default, int):
        if one.default and (NONE_OF.fullmatch(one.leaf) or re.search(CONDITION.format(one.leaf), source)):
            yield 0
        yield from _integers(one)
        if "None" in hint:
            yield None
    elif one.default is None and "int" in hint and "list" not in hint and "dict" not in hint.lower():
        yield from GIVEN
    elif "list" in hint and (isinstance(present, list) or present is None) and "float" not in hint:
        texts = "list[str]" in hint or one.leaf in LISTS
        one.per_layer = texts or "list[int]" in hint or "list[bool]" in hint
        members = {member for member in present or () if isinstance(member, str)}
        if texts:
            allowed = ALLOWED_MLP_LAYER_TYPES if one.leaf.startswith("mlp_") else ALLOWED_LAYER_TYPES
            named = {kind for kind in allowed if f'"{kind}"' in source}
            one.kinds = tuple(sorted(members | (named if one.leaf in LISTS else set())))
        elif present and len(present) > 1 and all(member in (0, 1) for member in present):
            one.kinds = (0, 1)
        if one.per_layer and (one.kinds or not texts):
            yield "list"
    elif isinstance(one.default, str):
        named = set(re.findall(r"'(\w+)'", hint)) if "Literal" in hint else set()
        compared = re.findall(rf'\.{one.leaf} [!=]= "(\w+)"', source)
        yield from sorted((named | set(compared)) - {one.default})


def _integers(one: Field) -> Iterator[int]:
    value = one.default
    if LAYERS.fullmatch(one.leaf) and value > 1:
        yield from (count for count in LAYER_COUNTS if count != value)
    elif EXPERTS.fullmatch(one.leaf) and value > 1:
        few_experts = min(value, FEW_EXPERTS)
        yield from (1, few_experts // 2, 2 * few_experts, 3 * few_experts)
    elif value <= 0:
        yield from (1, 2)
    elif value < SMALL:
        yield from (value + 1, 2 * value, 3 * value)
        if value > 1:
            yield value - 1
    else:
        yield from (2 * value, 3 * value, value // 2, 5 * value)


def few(one: Field) -> int | None:
    """Smaller value of a count of layers or experts for a quick model; None for another field."""
    if type(one.default) is not int:
        return None
    if LAYERS.fullmatch(one.leaf) and one.default > FEW_LAYERS:
        return FEW_LAYERS
    if EXPERTS.fullmatch(one.leaf) and one.default > FEW_EXPERTS:
        return FEW_EXPERTS
    return None
