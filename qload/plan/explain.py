"""`explain`: which kernel format and which kernel each layer gets, and why not each other one."""

from collections.abc import Sequence
from os import PathLike

import torch

from qload.errors import ArgumentError, checked
from qload.kernels import dtypes
from qload.listing import Groups, account
from qload.models.config import config_dtype
from qload.plan.asked import AskedKinds, Question
from qload.plan.explained import Explanation
from qload.plan.model import described_model
from qload.plan.plan import opened
from qload.plan.sharing import sharings
from qload.weights import Weights

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
