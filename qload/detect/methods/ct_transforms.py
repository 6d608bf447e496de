"""Transforms of compressed-tensors: applied to stored weights, or to inputs and outputs when layers run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from qload import configs
from qload.configs.matching import EMBEDDINGS, LINEAR_CLASS
from qload.detect.methods.ct_schemes import CT_VARIANTS
from qload.errors import UnsupportedFormatError
from qload.loader.transforms import TransformRule

WEIGHT_TRANSFORMS = ("weight_input", "weight_output")  # locations of transforms applied to stored weights
ONLINE_TRANSFORMS: Mapping[str, Literal["inputs", "outputs"]] = {"input": "inputs", "output": "outputs"}
ATTENTION_TRANSFORMS = frozenset(("q_attn", "k_cache"))  # of queries and keys alike: no product changes


class TransformStep(configs.Entry):
    """One application of a transform: modules and location."""

    targets: configs.NameList
    location: str
    inverse: bool = False
    ignore: configs.NameList | None = None


class TransformScheme(configs.Entry):
    """A transform, and its applications."""

    apply: Annotated[list[TransformStep], Field(min_length=1)]
    head_dim: Annotated[int, Field(ge=1)] | None = None
    randomize: bool = False


class Transforms(configs.Entry):
    """Section `transform_config`."""

    config_groups: dict[str, TransformScheme] = Field(default_factory=dict)


def check_locations(transforms: Transforms | None, source: configs.FoundConfig) -> None:
    """Raise UnsupportedFormatError for locations and keys of transforms that are not read."""
    keys = set((transforms.model_extra or {}) if transforms else ())
    known = {*WEIGHT_TRANSFORMS, *ONLINE_TRANSFORMS, *ATTENTION_TRANSFORMS}
    unknown = sorted((_locations(transforms) | keys) - known)
    if 0 < len(ATTENTION_TRANSFORMS & _locations(transforms)) < len(ATTENTION_TRANSFORMS):
        unknown = [f"one of {' and '.join(sorted(ATTENTION_TRANSFORMS))}"]
    if unknown:
        reason = f"the transform_config of {source.file} has the location or key {', '.join(unknown):.80}"
        name = "compressed-tensors with transforms"
        raise UnsupportedFormatError(name, reason, CT_VARIANTS, "vLLM runs it")


def _schemes(transforms: Transforms | None) -> Mapping[str, TransformScheme]:
    return transforms.config_groups if transforms else {}


def _locations(transforms: Transforms | None) -> set[str]:
    """Collect the locations of transforms."""
    return {step.location for scheme in _schemes(transforms).values() for step in scheme.apply}


def read_rules(transforms: Transforms | None, source: configs.FoundConfig) -> tuple[TransformRule, ...]:
    """Return the rules of online transforms, of inputs and outputs of layers."""
    patterns = configs.Patterns(source, "transform_config")
    return tuple(
        TransformRule(
            f"{name}_{step.location}",
            ONLINE_TRANSFORMS[step.location],
            step.inverse,
            scheme.head_dim,
            _Selection(
                LINEAR_CLASS in step.targets,
                configs.matcher(*(t for t in step.targets if t != LINEAR_CLASS), patterns=patterns),
                configs.matcher(*step.ignore or (), patterns=patterns),
            ),
            scheme.randomize,
        )
        for name, scheme in _schemes(transforms).items()
        for step in scheme.apply
        if step.location in ONLINE_TRANSFORMS
    )


@dataclass(frozen=True)
class _Selection:
    """Predicate of the modules that targets select and a list does not ignore; no embedding is linear."""

    every_linear: bool
    targets: Callable[[str], bool]
    ignored: Callable[[str], bool]

    def __call__(self, module: str) -> bool:
        linear = self.every_linear and module.rpartition(".")[2] not in EMBEDDINGS
        return (linear or self.targets(module)) and not self.ignored(module)


def describe(transforms: Transforms | None, source: configs.FoundConfig) -> list[str]:
    """Return notes on transforms without an effect on the weights as stored."""
    notes: list[str] = []
    locations = _locations(transforms)
    if not locations.isdisjoint(WEIGHT_TRANSFORMS) and locations <= {*WEIGHT_TRANSFORMS}:
        notes.append(
            f"the transform_config of {source.file} transforms weights alone: stored weights are transformed "
            "already, and are read as stored"
        )
    if not locations.isdisjoint(ATTENTION_TRANSFORMS):
        notes.append(
            f"the transform_config of {source.file} transforms queries and keys alike, which changes no "
            "product of them; it is left to the engine"
        )
    return notes
