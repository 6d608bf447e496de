"""Whether the configs of a checkpoint say the same: the one that counts, and others that programs read."""

from collections.abc import Iterator, Sequence

from qload.detect.claims import read_claims
from qload.detect.files import FoundConfig
from qload.detect.validation import Claims, agree
from qload.errors import ConfigsDisagreeError, QloadError
from qload.formats import ROLES
from qload.spec import Role
from qload.storage import WeightStorage

DECISIVE = ("method", "bits", "group_size")  # with another of these a layer means other weights
OTHERS = ("format", "sym", "desc_act")
SPELLINGS = {
    "method": ("quant_method", "method"),
    "bits": ("bits", "w_bit"),
    "group_size": ("group_size", "q_group_size"),
}


def check_configs(
    configs: Sequence[FoundConfig], claims: Claims, storage: WeightStorage
) -> Iterator[ConfigsDisagreeError]:
    """Each other method, bits or group size that another config has for layers that are there.

    `claims`: what is believed. Loading raises the first, `verify` tells each.
    """
    for name, found, other in _differences(configs, claims, DECISIVE):
        if _is_there(claims, other, storage):
            yield ConfigsDisagreeError(
                found.file,
                found.key(*SPELLINGS[name]),
                f"{getattr(claims, name)} as in {claims.file}",
                str(getattr(other, name)),
                f"remedy   make {found.file} say what {claims.file} says, or remove it",
            )


def config_notes(configs: Sequence[FoundConfig], claims: Claims, storage: WeightStorage) -> Iterator[str]:
    """Each difference that `check_configs` lets pass."""
    for name, found, other in _differences(configs, claims, (*DECISIVE, *OTHERS)):
        if name in OTHERS or not _is_there(claims, other, storage):
            ours, theirs = getattr(claims, name), getattr(other, name)
            yield f"{found.file}: {name} is {theirs!r}, {claims.file} says {ours!r} and is believed"


def _differences(
    configs: Sequence[FoundConfig], claims: Claims, names: Sequence[str]
) -> Iterator[tuple[str, FoundConfig, Claims]]:
    """(setting, config, its claims) wherever a config beside the first says otherwise than is believed."""
    for found in configs[1:]:
        try:
            other = read_claims(found)
        except QloadError:  # which is a finding of its own
            continue
        for name in names:
            ours, theirs = getattr(claims, name), getattr(other, name)
            guessed = name == "method" and agree(found, "quant_method", "method") is None
            if ours is not None and theirs is not None and ours != theirs and not guessed:
                yield name, found, other


def _is_there(claims: Claims, other: Claims, storage: WeightStorage) -> bool:
    """Whether a tensor is stored that a quantized layer of either config has, and a plain layer has not."""
    if claims.loader or other.loader:  # formats that differ by module
        return True
    suffixes = {
        suffix
        for one in (claims, other)
        for fmt in one.formats
        for spec in fmt.specs()
        for suffix in spec.suffixes
        if ROLES.get(suffix.rpartition(".")[2], Role.FLOAT) is not Role.FLOAT
    }
    names, endings = storage.keys(), tuple(f".{suffix}" for suffix in suffixes)
    return not suffixes.isdisjoint(names) or any(name.endswith(endings) for name in names)
