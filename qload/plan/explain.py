"""`explain`: kernel format and kernel of each layer on a chip, with the reasons against the others."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike

import torch

from qload.checkpoint import LayerIndex, account, opened
from qload.errors import ArgumentError, CastError, QloadError, checked
from qload.kernel_formats import strips
from qload.kernel_formats.repack import NUMBERS_IN_STRIPS, find_repacked_type
from qload.kernels import dtypes
from qload.kernels.plans import DEQUANTIZED
from qload.loader import LayerDescription
from qload.loader.layer_values import check_scales
from qload.models.config import config_dtype
from qload.plan.kernels import kernels_for, kernels_without_operator
from qload.plan.report import ExplainedLayer, Explanation
from qload.plan.sharing import RankShare, Sharing, first_rank_share, sharings, supported_text_config
from qload.repacking.loaders import FastestLoader
from qload.spec import Weight
from qload.weights import Weights

FORMAT_OF_LAYOUT = {"strips": "strips", "panels": "panels", "marlin": "gptq_marlin", "exllama": "exllama"}
CPU = torch.device("cpu")
FALLBACK_DTYPE = torch.bfloat16
MIN_CAPABILITY = 20  # of capability 2.0; a smaller number is a typing error such as sm12 for sm120
FIRST_OF_KIND_NOTE = (
    "layers alike are explained once, by the first one's values; qload verify reads the others"
)
NO_DTYPE = "config.json names no dtype of float16, bfloat16 and float32: activations of bfloat16 are assumed"
EXPERTS_NOTE = (
    "each matrix of an expert is listed alone; on Hopper grouped kernels multiply experts in strips"
)


@dataclass(frozen=True)
class _LayerExplainer:
    """Explanations of layers, computed once for layers of one description with the same shares.

    `capability` is ten times the compute capability, None for a CPU.
    """

    weights: Weights
    capability: int | None
    tp: int
    dtype: torch.dtype
    tokens: tuple[int, ...]
    _cache: dict[tuple[int, Hashable], ExplainedLayer] = field(default_factory=dict)  # by id(cuts), sharing
    _alive: list[object] = field(default_factory=list)  # keeps the ids unique

    @property
    def chip(self) -> tuple[int, int] | None:
        """Compute capability as (major, minor)."""
        return None if self.capability is None else divmod(self.capability, 10)

    def explain(
        self, prefix: str, layer: LayerDescription | QloadError | None, sharing: Sharing
    ) -> ExplainedLayer:
        """Explain one layer; a `layer` None is not stored."""
        if not isinstance(layer, LayerDescription):
            return ExplainedLayer(prefix, None, (), error=str(layer or self.weights.missing(prefix)))
        key = id(layer.cuts), sharing.key
        explained = self._cache.get(key)
        if explained is None:
            self._alive.append(layer.cuts)
            explained = self._explain(layer, sharing)
            if not explained.error:  # an error names its own layer
                self._cache[key] = explained
        return replace(explained, prefix=prefix)

    def _explain(self, layer: LayerDescription, sharing: Sharing) -> ExplainedLayer:
        weight_type = layer.format.weight_type
        name = weight_type.format
        shape = (layer.N, layer.K) if "K" in layer.sizes else (layer.N,)
        bits = getattr(layer.format.config, "bits", None)
        stored = ExplainedLayer(layer.prefix, name, shape, kernel_format=name, bits=bits)
        try:
            share = first_rank_share(self.weights, layer, sharing, self.tp)
            if self.weights.nonfinite == "error":
                check_scales(share.weights, [layer], {}, whole=False)
            if weight_type.plain or self._loader_of(share).made(layer, CPU) is None:
                scheme = layer.format.activations
                choices = kernels_without_operator(weight_type, scheme, self.tokens, self.dtype, self.chip)
                return replace(stored, choices=choices)
            return self._explain_repacked(stored, share)
        except QloadError as error:
            return replace(stored, error=str(error))

    def _loader_of(self, share: RankShare) -> FastestLoader:
        """Return the loader that repacks a share for the chip."""
        return FastestLoader(share.weights.loader, strict=False, dtype=None).for_chip(self.capability)

    def _explain_repacked(self, stored: ExplainedLayer, share: RankShare) -> ExplainedLayer:
        """Repack the share, without its codes, as a load for the chip does, and choose its kernels."""
        weight = share.load_header(self._loader_of(share))
        reasons = dict(self._reasons_against_formats(share, weight.format))
        repacked = replace(stored, kernel_format=weight.format, formats=reasons)
        try:
            fitted = dtypes.for_activations(weight, self.dtype)
        except CastError as error:
            return replace(repacked, error=str(error))
        choices = kernels_for(fitted, self.dtype, self.chip, self.tokens)
        slow = self.chip is not None and any(choice.kernel == DEQUANTIZED for choice in choices)
        changes = tuple(self._better_dtypes(weight)) if slow else ()
        return replace(repacked, shape=weight.shape, choices=choices, changes=changes)

    def _reasons_against_formats(self, share: RankShare, chosen: str) -> Iterator[tuple[str, str]]:
        """Yield each kernel format that is not chosen, with the reason."""
        for layout, usual in FORMAT_OF_LAYOUT.items():
            stored = share.layer.format
            target = find_repacked_type(stored.weight_type, layout, stored.config)
            name = target.format if target is not None and target in NUMBERS_IN_STRIPS else usual
            if name == chosen:
                continue
            reason = share.why_not_layout(layout)
            if reason is not None:
                yield name, reason
            elif layout == "panels" and self.capability is not None:
                yield name, "only the CPU module reads it"
            elif layout == "strips":  # the fastest wherever kernels read them
                yield name, f"read from sm{strips.CAPABILITY} on"
            else:
                yield name, f"could hold it as well; {chosen} is preferred"

    def _better_dtypes(self, weight: Weight) -> Iterator[str]:
        """Yield other dtypes of activations with which kernels of qload run for all numbers of tokens."""
        for dtype in dtypes.DTYPES:
            if dtype != self.dtype:
                try:
                    fitted = dtypes.for_activations(weight, dtype)
                except CastError:
                    continue
                choices = kernels_for(fitted, dtype, self.chip, self.tokens)
                if all(choice.kernel != DEQUANTIZED for choice in choices):
                    kernels = ", ".join(dict.fromkeys(choice.kernel for choice in choices))
                    yield f"activations of {str(dtype).removeprefix('torch.')}: {kernels}"


@checked
def explain(
    path_or_weights: str | PathLike[str] | Weights,
    *,
    arch: str | None = None,
    tp: int = 1,
    dtype: torch.dtype | None = None,
    tokens: Sequence[int] = (1, 64, 1024),
) -> Explanation:
    """Choose the kernel of each layer on a chip, in this machine or not, with reasons against the others.

    Layers are repacked as by `open_checkpoint(path, target="auto")`, and kernels chosen as by calls. No codes
    are read.

    Parameters
    ----------
    path_or_weights
        A safetensors file, a directory, or a sharded index; or the result of `open_checkpoint`.
    arch
        "sm80", "sm90" and the like, or "cpu"; None: this machine.
    tp
        Number of ranks; the share of rank 0 is explained.
    dtype
        Dtype of the activations: float16, bfloat16 or float32. None: the dtype in config.json, or bfloat16
        with a note.
    tokens
        Numbers of rows of x.

    Raises
    ------
    ArgumentError
        For an unknown `arch` or `dtype`, and for numbers below 1.
    StorageError, ConfigError, UnsupportedFormatError
        As `open_checkpoint`, if the path cannot be opened.

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
    ('strips', ['decode', 'large'])
    """
    if tp < 1 or not tokens or min(tokens) < 1:
        raise ArgumentError("tp, tokens", "numbers of at least 1", f"tp={tp}, tokens={tokens}")
    if dtype is not None and dtype not in dtypes.DTYPES:
        raise ArgumentError("dtype", "torch.float16, torch.bfloat16 or torch.float32", str(dtype))
    capability = capability_of(arch)
    with opened(path_or_weights) as (weights, model_config):
        config, note = supported_text_config(model_config)
        stated_dtype = config_dtype(model_config)
        activations = dtype or stated_dtype or FALLBACK_DTYPE
        index = LayerIndex(weights)
        explainer = _LayerExplainer(weights, capability, tp, activations, tuple(tokens))
        accounted = account(index)
        layers = [
            explainer.explain(prefix, index.layers.get(prefix), sharing)
            for prefix, sharing in sharings(index, config, None).items()
            if not accounted.hides(prefix)
        ]
        notes = [] if dtype or stated_dtype else [NO_DTYPE]
        notes.append(FIRST_OF_KIND_NOTE)
        if any(".experts." in layer.prefix for layer in layers):
            notes.append(EXPERTS_NOTE)
        if note and tp > 1:
            notes.append(note)
        return Explanation(
            path="" if isinstance(path_or_weights, Weights) else str(path_or_weights),
            arch="cpu" if capability is None else f"sm{capability}",
            tp=tp,
            dtype=str(activations).removeprefix("torch."),
            layers=sorted(layers, key=lambda layer: layer.prefix),
            notes=notes + accounted.notes(),
            unread=dict(accounted.report.unread),
        )


def capability_of(arch: str | None) -> int | None:
    """Return ten times the compute capability of an `arch`; None: a CPU. ArgumentError for an unknown one."""
    if arch is None:
        if not torch.cuda.is_available():
            return None
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor
    digits = arch.removeprefix("sm")
    known = arch.startswith("sm") and digits.isascii() and digits.isdecimal() and len(digits) in (2, 3)
    known = known and int(digits) >= MIN_CAPABILITY
    if arch != "cpu" and not known:
        raise ArgumentError("arch", "cpu, or a chip such as sm80 or sm90", repr(arch[:80]))
    return int(digits) if known else None
