"""`explain`: kernel format and kernel of each layer on a chip, with the reasons against the others."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike

import torch

from qload.errors import ArgumentError, CastError, QloadError, checked
from qload.kernel_formats import strips
from qload.kernels import dtypes
from qload.listing import Groups, account
from qload.loader import LayerDescription
from qload.models.config import config_dtype
from qload.plan.kernels import DEQUANTIZED, kernels_for, without_kernel
from qload.plan.plan import opened
from qload.plan.report import ExplainedLayer, Explanation
from qload.plan.sharing import FirstShare, Sharing, described_model, first_share, sharings
from qload.repacking.loaders import FastestLoader
from qload.spec import Weight
from qload.weights import Weights

LAYOUTS = {
    "strips": "strips",
    "panels": "panels",
    "marlin": "gptq_marlin",
    "exllama": "exllama",
}  # -> formats
HERE = torch.device("cpu")


@dataclass(frozen=True)
class Question:
    """What is asked of every layer: of which chip, None: no CUDA device; ranks, activations, tokens."""

    capability: int | None
    tp: int
    dtype: torch.dtype
    tokens: tuple[int, ...]

    @property
    def chip(self) -> tuple[int, int] | None:
        """The capability in two numbers."""
        return None if self.capability is None else divmod(self.capability, 10)


class AskedKinds:
    """Answers by kinds of layers: those that are described alike and are shared alike."""

    def __init__(self, weights: Weights, question: Question) -> None:
        self.weights, self.question = weights, question
        self._known: dict[tuple[int, Hashable], ExplainedLayer] = {}
        self._kept: list[object] = []  # so that no two layers have one id

    def of(self, prefix: str, layer: LayerDescription | QloadError | None, how: Sharing) -> ExplainedLayer:
        """The layer under `prefix`, shared as `how` says; None: it is not stored."""
        if not isinstance(layer, LayerDescription):
            return ExplainedLayer(prefix, None, (), error=str(layer or self.weights.missing(prefix)))
        kind = id(layer.cuts), how.question
        known = self._known.get(kind)
        if known is None:
            self._kept.append(layer.cuts)
            known = self._told(layer, how)
            if not known.error:  # which names its own layer
                self._known[kind] = known
        return replace(known, prefix=prefix)

    def _told(self, layer: LayerDescription, how: Sharing) -> ExplainedLayer:
        kind, question = layer.format.weight_type, self.question
        shape = (layer.N, layer.K) if "K" in layer.sizes else (layer.N,)
        bits = getattr(layer.format.config, "bits", None)
        stored = ExplainedLayer(layer.prefix, kind.format, shape, kernel_format=kind.format, bits=bits)
        try:
            share = first_share(self.weights, layer, how, self.question.tp)
            if kind.plain or FastestLoader(share.loader).made(layer, HERE) is None:
                return replace(
                    stored,
                    choices=without_kernel(
                        kind, layer.format.activations, question.tokens, question.dtype, question.chip
                    ),
                )
            return self._chosen(stored, share)
        except QloadError as error:
            return replace(stored, error=str(error))

    def _chosen(self, stored: ExplainedLayer, share: FirstShare) -> ExplainedLayer:
        """The kernel format that the fastest loader makes, and the kernels that read it."""
        question = self.question
        loader = FastestLoader(share.loader, strict=False, dtype=None).for_chip(question.capability)
        made = share.load(loader)
        formats = dict(self._formats(share, made.format))
        try:
            fitted = dtypes.for_activations(made, question.dtype)
        except CastError as error:
            return replace(stored, kernel_format=made.format, formats=formats, error=str(error))
        choices = kernels_for(fitted, question.dtype, question.chip, question.tokens)
        slow = question.chip is not None and any(each.kernel == DEQUANTIZED for each in choices)
        changes = tuple(self._changes(made)) if slow else ()
        shape = made.shape
        return replace(
            stored, shape=shape, kernel_format=made.format, formats=formats, choices=choices, changes=changes
        )

    def _formats(self, share: FirstShare, taken: str) -> Iterator[tuple[str, str]]:
        """Of each kernel format that is not taken, why not."""
        for layout, name in LAYOUTS.items():
            if name == taken:
                continue
            reason = share.why_not(layout)
            if reason is not None:
                yield name, reason
                continue
            if layout == "panels" and self.question.capability is not None:
                yield name, "is read by CPUs alone"
            elif layout == "strips" and not strips.are_faster(self.question.capability):
                yield name, f"gains nothing on other chips than those of capability {strips.CAPABILITY}"
            else:
                yield name, f"could hold it too, and {taken} is preferred here"

    def _changes(self, made: Weight) -> Iterator[str]:
        """What else of the activations would give a kernel of ours."""
        question = self.question
        for dtype in dtypes.DTYPES:
            if dtype != question.dtype:
                try:
                    fitted = dtypes.for_activations(made, dtype)
                except CastError:
                    continue
                found = kernels_for(fitted, dtype, question.chip, question.tokens)
                if all(each.kernel != DEQUANTIZED for each in found):
                    kernels = ", ".join(dict.fromkeys(each.kernel for each in found))
                    yield f"activations of {str(dtype).removeprefix('torch.')}: {kernels}"


FIRST = (
    "alike layers, of one shape, dtype and grouping, are asked once: with zero points and scales of the first"
)
FALLBACK = torch.bfloat16  # dtype of the activations where config.json names none
NO_DTYPE = "config.json names no dtype of float16, bfloat16 and float32: activations of bfloat16 are assumed"
FIRST_CHIP = 20  # of capability 2.0; below it are slips such as sm12 for sm120
EXPERTS = "of experts each matrix is told by itself: kernels that multiply all experts at once are not"


@checked
def explain(
    path_or_weights: str | PathLike[str] | Weights,
    *,
    arch: str | None = None,
    tp: int = 1,
    dtype: torch.dtype | None = None,
    tokens: Sequence[int] = (1, 64, 1024),
) -> Explanation:
    """Which kernel multiplies each layer on a chip, that need not be here, and why not each other one.

    As `open_checkpoint(path, target="auto")` repacks, and as calls choose; no codes are read.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or what `open_checkpoint` made of one.
    arch
        "sm80", "sm90" and the like, or "cpu"; None: this machine's.
    tp
        How many ranks share the layers; told is the share of the first.
    dtype
        Of the activations: float16, bfloat16 or float32. None: the dtype that config.json names, or bfloat16
        with a note where it names none of these.
    tokens
        Numbers of rows of x.

    Raises
    ------
    ArgumentError
        For an `arch`, a `dtype` or numbers that there are none of.
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, where the path cannot be opened.

    Examples
    --------
    >>> import torch
    >>> from qload import MemoryStorage, Weights, explain, loader_from_config
    >>> words, scales = torch.zeros(16, 64, dtype=torch.int32), torch.ones(1, 64).half()
    >>> tensors = {"up.qweight": words, "up.qzeros": words[:1, :8], "up.scales": scales}
    >>> config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    >>> weights = Weights(MemoryStorage(tensors), loader=loader_from_config(config))
    >>> (layer,) = explain(weights, arch="sm80", dtype=torch.float16, tokens=[1, 1024]).layers
    >>> layer.kernel_format, [choice.kernel for choice in layer.choices]
    ('gptq_marlin', ['w4a16', 'large'])
    """
    if tp < 1 or not tokens or min(tokens) < 1:
        raise ArgumentError("tp, tokens", "numbers of at least 1", f"tp={tp}, tokens={tokens}")
    if dtype is not None and dtype not in dtypes.DTYPES:
        raise ArgumentError("dtype", "torch.float16, torch.bfloat16 or torch.float32", str(dtype))
    capability = capability_of(arch)
    with opened(path_or_weights) as (weights, model_config):
        config, why = described_model(model_config)
        stated = config_dtype(model_config)
        activations = dtype or stated or FALLBACK
        question = Question(capability, tp, activations, tuple(tokens))
        groups, asked = Groups(weights), AskedKinds(weights, question)
        accounted = account(groups)
        layers = [
            asked.of(prefix, groups.layers.get(prefix), how)
            for prefix, how in sharings(groups, config, None).items()
            if not accounted.hides(prefix)
        ]
        path = "" if isinstance(path_or_weights, Weights) else str(path_or_weights)
        notes = [] if dtype or stated else [NO_DTYPE]
        notes += [FIRST, *([EXPERTS] if any(".experts." in each.prefix for each in layers) else [])]
        notes += [*([why] if why and tp > 1 else []), *accounted.notes()]
        named = "cpu" if capability is None else f"sm{capability}"
        ordered = sorted(layers, key=lambda layer: layer.prefix)
        unread = dict(accounted.report.unread)
        named_dtype = str(activations).removeprefix("torch.")
        return Explanation(path, named, tp, named_dtype, ordered, notes, unread)


def capability_of(arch: str | None) -> int | None:
    """The compute capability, times 10, that an `arch` names; None: no CUDA device. ArgumentError."""
    if arch is None:
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor
    digits = arch.removeprefix("sm")
    known = arch.startswith("sm") and digits.isascii() and digits.isdecimal() and len(digits) in (2, 3)
    known = known and int(digits) >= FIRST_CHIP
    if arch != "cpu" and not known:
        raise ArgumentError("arch", "cpu, or a chip's, such as sm80 or sm90", repr(arch[:80]))
    return int(digits) if known else None
