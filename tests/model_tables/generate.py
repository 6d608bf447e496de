"""Entries of the file of tables, one type after another."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from qload.architecture.architecture import read_text_architecture
from qload.architecture.generated_tables import table_of
from qload.architecture.model_tables import TABLES
from qload.architecture.published_names import PUBLISHED
from qload.architecture.table import rows_by_key
from tests.model_tables.build import Sample, Shapes, build_model, stored_name
from tests.model_tables.draw import fields_of, flatten, make_config, sections_of, text_section
from tests.model_tables.explore import explore
from tests.model_tables.prove import WEIGHT, differences, prune
from tests.model_tables.table import UNKNOWN, Defaults, Entry, Fitted, Towers

PROOFS, ROUNDS = 10, 3
MAX_CONSTANT = 3  # a width of convolutions
# The first class of a type counts; a class with towers precedes one of its text model alone.
MAPPINGS = (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)


def model_classes() -> dict[str, list[str]]:
    """Return each type of language model without a hand-written table -> its classes."""
    found: dict[str, list[str]] = {}
    for mapping in MAPPINGS:
        for model_type, name in mapping.items():
            if model_type in CONFIG_MAPPING_NAMES and model_type not in TABLES:
                found.setdefault(model_type, []).append(name if isinstance(name, str) else name[0])
    return found


def generate(model_type: str, class_names: Sequence[str]) -> dict[str, Any]:
    """Fit and prove the entry of a type; ValueError for samples that contradict the pruned entry."""
    if model_type in ("kyutai_speech_to_text", "pop2piano"):
        raise ValueError("its table does not explain a tiny model")
    if model_type in PUBLISHED:
        raise ValueError("its published names are renamed, and have no table")
    model_class = class_of_type(model_type, class_names)
    explored = explore(model_class, model_type)
    samples = explored.samples
    model = build_model(model_class, make_config(model_class.config_class, samples[0].changes))
    defaults = read_defaults(model_class, model)
    entry = fit_entry(samples, defaults)
    for _ in range(ROUNDS):
        samples = [*samples, *(explored.draw() for _ in range(PROOFS))]
        found = contradictions(entry, samples)
        if not found:
            return entry
        if "name" in found.values():
            entry = fit_entry(samples, defaults)
        else:
            prune(entry, found)
    found = contradictions(entry, [explored.draw() for _ in range(PROOFS)])
    if found:
        raise ValueError(f"{len(found)} rows are not explained: {sorted(found.items())[:3]}")
    return entry


def class_of_type(model_type: str, class_names: Sequence[str]) -> type[PreTrainedModel]:
    """Return the class for the configs of a type; one that has another type's configs gets these."""
    classes: list[type[PreTrainedModel]] = [getattr(transformers, name) for name in class_names]
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    for model_class in classes:
        if model_class.config_class is config_class:
            return model_class
    return type(classes[0].__name__, (classes[0],), {"config_class": config_class})


def fit_entry(samples: Sequence[Sample], defaults: Defaults) -> dict[str, Any]:
    """Fit an entry to samples; one of the tensors around a text model that has its own table."""
    declared = frozenset(defaults.declared)
    if not defaults.outer:
        entry = Entry(Fitted(samples, declared, defaults.section), defaults).data()
    else:
        towers = [replace(sample, shapes=outer_shapes(sample)) for sample in samples]
        entry = Towers(Fitted(towers, declared, defaults.section, with_layers=False), defaults).data()
    forget_constants(entry)
    return entry


def forget_constants(entry: Mapping[str, Any]) -> None:
    """Make sizes unknown that no draw changed, except widths of convolutions; also sums of two quotients."""
    given = {name for name, flag in entry.get("flags", {}).items() if flag.get("given")}
    for line in entry["rows"]:
        if len(line) > 1:
            largest = 1 if given.intersection("".join(line[3:4]).split()) else MAX_CONSTANT
            sizes = line[1].split()
            line[1] = " ".join(UNKNOWN if is_accidental(size, largest) else size for size in sizes)


def is_accidental(size: str, largest: int) -> bool:
    """Return whether an expression may fit the draws by accident; `largest`: the largest sound constant."""
    return size.count("/") > 1 or (size.isdecimal() and int(size) > largest)


def outer_shapes(sample: Sample) -> Shapes:
    """Return the tensors of a sample that are not of its text model."""
    text = read_text_architecture(sample.config)
    assert text is not None
    return {
        name: shape
        for name, shape in sample.shapes.items()
        if text.find(name) is None and text.find(name.removesuffix(WEIGHT)) is None
    }


def contradictions(entry: Mapping[str, Any], samples: Sequence[Sample]) -> dict[str, str]:
    """Return the rows of an entry that samples contradict; see `differences`."""
    found: dict[str, str] = {}
    for sample in samples:
        found |= differences(entry, sample)
    if "text" in entry:  # the table of the text model answers for its own rows
        own = rows_by_key(table_of(entry))
        found = {key: kind for key, kind in found.items() if kind == "name" or key in own}
    return found


def read_defaults(model_class: type[PreTrainedModel], model: PreTrainedModel) -> Defaults:
    """Return what the class of a model says without samples."""
    config = model_class.config_class()
    declared: dict[str, Any] = {}
    aliases: dict[str, list[str]] = {}
    sections: dict[str, str] = {}
    for lead, section in sections_of(config):
        if lead:
            sections[lead.removesuffix(".")] = section.model_type
        for item in fields(type(section)):
            declared[f"{lead}{item.name}"] = item.default
        for alias, name in type(section).attribute_map.items():
            aliases.setdefault(f"{lead}{name}", []).append(f"{lead}{alias}")
    for one in fields_of(model_class.config_class):
        declared.setdefault(one.name, None)  # read by the model alone
    head, embedding = (
        None if end is None else stored_name(model, end)
        for end in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    return Defaults(
        model_class.__name__,
        flatten(config.to_dict()),
        declared,
        aliases,
        sections,
        head,
        embedding,
        text_section(config),
        config.get_text_config() is not config and config.get_text_config().model_type in TABLES,
    )
