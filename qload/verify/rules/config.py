"""Rules of the quantization config: side files, and a method, bits or details that no tensor confirms.

Loaders believe the tensors. A program that believes the config reads bytes of e5m2 as e4m3, or floating point
scales as codes. A checkpoint that names a method and contains plain tensors alone has lost its quantized
layers without another contradiction.
"""

from collections.abc import Iterator
from pathlib import Path

from qload.detect import read_claims
from qload.errors import QloadError, UnsupportedFormatError
from qload.formats import BNB4Config, Fp8Config
from qload.loader import LayerDescription
from qload.spec import Config, LayerClaims, Role
from qload.storage.checkpoint_files import INDEX
from qload.verify.checkpoint import VerifiedCheckpoint
from qload.verify.report import Finding, finding_of
from qload.verify.rules.rule import Rule

DETAILED_CONFIGS = (BNB4Config, Fp8Config)  # configs with details that notes of the loader contradict


def check_side_files(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each further config file that is malformed, or of an unsupported method."""
    for config in checkpoint.configs[1:]:
        try:
            read_claims(config)
        except QloadError as error:
            finding = finding_of(error, severity="warning")
            if isinstance(error, UnsupportedFormatError):  # about this config, not the checkpoint
                finding = Finding(
                    rule.id,
                    "warning",
                    None,
                    config.file,
                    f"{config.file}: {finding.message}",
                    finding.remedy or rule.text.remedy,
                )
            yield finding


def check_method(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report a method without a layer if all layers are plain and read, and bits without a layer."""
    claims = checkpoint.claims
    if claims is None or not claims.formats or _is_file_of_index(Path(checkpoint.location)):
        return
    formats = {fmt.weight_type.format for fmt in claims.formats}
    if all(_is_plain(layer) for layer in checkpoint.layers.values()) and not checkpoint.unread:
        yield rule.finding(
            None,
            claims.file,
            f"{claims.file}: quant_method is {claims.method}, and no layer is stored as "
            f"{' or '.join(sorted(formats))}: {len(checkpoint.layers)} layers are plain",
        )
    yield from _denied_bits(rule, checkpoint, claims.file)


def _denied_bits(rule: Rule, checkpoint: VerifiedCheckpoint, file: str) -> Iterator[Finding]:
    """Report each claim of bits, of the base config or an entry, that all of its layers contradict."""
    of_claims: dict[LayerClaims, list[Config]] = {}
    for layer in checkpoint.described():
        if layer.format.claims is not None and not layer.format.weight_type.plain:
            of_claims.setdefault(layer.format.claims, []).append(layer.format.config)
    for claims, configs in of_claims.items():
        denied = [config for config in configs if getattr(config, "claimed_bits", None) is not None]
        if denied and len(denied) == len(configs):
            stored = " or ".join(sorted({str(getattr(config, "bits", None)) for config in denied}))
            layers = f"its {len(configs)} layers" if claims.source else "all layers"
            yield rule.finding(
                None,
                file,
                f"{file}: {claims.says('bits')}, but by shape {layers} have {stored}",
                f"set bits to {stored} in {claims.place(file)}",
            )


def _is_plain(layer: LayerDescription | QloadError) -> bool:
    """Return whether a layer is plain, without a scale of the method next to it."""
    if isinstance(layer, QloadError) or not layer.format.weight_type.plain:
        return False
    return not any(spec.role is Role.UNUSED for spec in layer.specs)


def _is_file_of_index(path: Path) -> bool:
    """Return whether a path is a file next to an index: the quantized layers may be in another file."""
    return path.is_file() and not path.name.endswith(INDEX) and any(path.parent.glob(f"*{INDEX}"))


def check_details(rule: Rule, checkpoint: VerifiedCheckpoint) -> Iterator[Finding]:
    """Report each wrong detail once: for all layers, or for the first layer with their number."""
    prefixes_of: dict[str, list[str]] = {}
    for layer in checkpoint.described():
        if isinstance(layer.format.config, DETAILED_CONFIGS):
            for note in layer.notes:
                prefixes_of.setdefault(note, []).append(layer.prefix)
    layers = [layer for layer in checkpoint.described() if isinstance(layer.format.config, DETAILED_CONFIGS)]
    file = checkpoint.claims.file if checkpoint.claims else None
    for note, prefixes in prefixes_of.items():
        remedy = f"correct this setting in {file or 'the config'}"
        if len(prefixes) == len(layers) > 1 and not checkpoint.is_shard:
            message = f"{file}: {note}, in all {len(prefixes)} layers"
            yield rule.finding(None, file, message, remedy)
        else:
            message = f"{prefixes[0]}: {note}; {len(prefixes)} layers in all"
            yield rule.finding(prefixes[0], file, message, remedy)
