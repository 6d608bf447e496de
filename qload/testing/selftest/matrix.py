"""The kill matrix of one kernel: known faults, planted one at a time, and the checks that notice each.

The checks are those of `qload.testing`, and three tolerances in wide use, to show their gaps: `cosine` above
.99, as for activations; `mean relative` error under .04, as in Marlin's tests; `allclose` with rtol .2 and
atol .2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from qload.diagnosis import diagnose
from qload.errors import ArgumentError
from qload.formats import (
    AWQConfig,
    AWQWeight,
    CTPackConfig,
    CTPackWeight,
    Fp8Config,
    Fp8Weight,
    GPTQConfig,
    GPTQWeight,
    ModelOptNVFP4Weight,
    NVFP4Config,
)
from qload.spec import Weight
from qload.testing.checks import Kernel, Misread, assert_reads_back, assert_within_bound, read_back
from qload.testing.kernel_faults import KERNEL_FAULTS, KernelFault
from qload.testing.selftest.runner import run_faults

N, K, GROUP = 128, 256, 32  # the smallest sizes that most kernels take


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _words(seed: int, *shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=_random(seed), dtype=torch.int32)


def _scales(seed: int, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return (0.002 + 0.004 * torch.rand(shape, generator=_random(seed))).to(dtype)


def gptq(*, act_order: bool = False) -> GPTQWeight:
    """GPTQ with zero points of 2 to 8, of which none wraps at one more or less; `act_order`: shuffled."""
    index = torch.arange(K) // GROUP
    if act_order:
        index = index[torch.randperm(K, generator=_random(3))]
    return GPTQWeight(
        config=GPTQConfig(4, GROUP),
        qweight=_words(0, K // 8, N),
        qzeros=(_words(1, K // GROUP, N // 8) & 0x66666666) + 0x11111111,
        scales=_scales(2, K // GROUP, N),
        g_idx=index.int(),
    )


def symmetric_gptq() -> GPTQWeight:
    """Symmetric GPTQ: every zero point 8, groups in order."""
    return gptq().holding({"qzeros": torch.full((K // GROUP, N // 8), 0x77777777, dtype=torch.int32)})


def awq() -> AWQWeight:
    """AWQ with zero points."""
    return AWQWeight(
        config=AWQConfig(group_size=GROUP),
        qweight=_words(0, K, N // 8),
        qzeros=_words(1, K // GROUP, N // 8),
        scales=_scales(2, K // GROUP, N),
    )


def ct_pack() -> CTPackWeight:
    """Symmetric packed integers of compressed-tensors, with bfloat16 scales."""
    return CTPackWeight(
        config=CTPackConfig(4, GROUP, dense=True, shape=(N, K)),
        weight_packed=_words(0, N, K // 8),
        weight_scale=_scales(2, N, K // GROUP, dtype=torch.bfloat16),
    )


def fp8() -> Fp8Weight:
    """FP8 with a scale for each block of 32 by 32."""
    values = torch.randn(N, K, generator=_random(0)).to(torch.float8_e4m3fn)
    return Fp8Weight(
        config=Fp8Config(per="block", block=(32, 32)),
        weight=values,
        weight_scale=_scales(2, N // 32, K // 32).float(),
    )


def nvfp4() -> ModelOptNVFP4Weight:
    """NVFP4 of ModelOpt, with a scale for the whole tensor."""
    return ModelOptNVFP4Weight(
        config=NVFP4Config(),
        weight=torch.randint(256, (N, K // 2), generator=_random(0)).to(torch.uint8),
        weight_scale=(torch.rand(N, K // 16, generator=_random(1)) + 0.5).to(torch.float8_e4m3fn),
        weight_scale_2=torch.tensor([0.0123]),
    )


# By name: a format, or a format with a variant.
SAMPLE_WEIGHTS: dict[str, Callable[[], Weight]] = {
    "gptq": symmetric_gptq,
    "gptq-zeros": gptq,
    "gptq-act-order": partial(gptq, act_order=True),
    "awq": awq,
    "ct_pack": ct_pack,
    "fp8": fp8,
    "nvfp4": nvfp4,
}


TOKENS = 32  # two tiles of sixteen
READ_BACK = "read back"
MIN_COSINE, MAX_MEAN_RELATIVE, CLOSE_TOLERANCE = 0.99, 0.04, 0.2

Oracle = Callable[[Kernel, Weight, torch.dtype], bool]  # True for a kernel that passes


class Adapter(Protocol):
    """A kernel under test: the `format` that it reads, its packing, and its product."""

    format: str

    def pack(self, weight: Any) -> Any:
        """Return the buffers of a typed `weight`."""

    def gemm(self, x: Tensor, buffers: Any) -> Tensor:
        """Multiply x (M, K) by `buffers` -> y (M, N)."""


@dataclass(frozen=True)
class KillRow:
    """The result of one fault, planted in the kernel for one sample weight.

    Attributes
    ----------
    subject
        The name of the sample weight.
    fault, words
        The id and the description of the fault.
    noticed
        By name of each check: whether it failed, as it should.
    named
        The class of the diagnosis of the weight that is read back; None for no class.
    refused
        The class and the first line of the error of the kernel's own packing, which is more than any check
        says; "" if it packed the weight.
    """

    subject: str
    fault: str
    words: str
    noticed: dict[str, bool]
    named: str | None
    refused: str = ""

    @property
    def caught(self) -> bool:
        """True if a check of qload notices the fault, or the kernel refuses such a weight."""
        return bool(self.refused) or any(self.noticed[name] for name in REQUIRED_CHECKS)

    @property
    def end(self) -> str:
        """ "caught", "let through", or "refused" with the error."""
        return f"refused ({self.refused})" if self.refused else "caught" if self.caught else "let through"

    def row(self) -> dict[str, Any]:
        """The columns of the report by name."""
        first = {"subject": self.subject, "fault": self.fault, "words": self.words, "end": self.end}
        checks = {name: "caught" if noticed else "let through" for name, noticed in self.noticed.items()}
        return {**first, "named": self.named, **checks}


def kill_matrix(adapter: Adapter, dtype: torch.dtype = torch.float16) -> Iterator[KillRow]:
    """Yield a row for every fault that applies to the kernel of `adapter`, with activations of `dtype`.

    The sample weights are those of its format: one of `SAMPLE_WEIGHTS`, or all whose name begins with the
    format's. ArgumentError if there are none, or if the kernel is wrong before a fault is planted.
    """
    variants = [name for name in SAMPLE_WEIGHTS if name.startswith(adapter.format)]
    names = [adapter.format] if adapter.format in SAMPLE_WEIGHTS else variants
    if not names:
        raise ArgumentError("format", f"one of {', '.join(SAMPLE_WEIGHTS)}", repr(adapter.format))
    for name in names:
        weight = SAMPLE_WEIGHTS[name]()
        correct = _read_back_correctly(adapter, weight, dtype)
        yield from run_faults(KERNEL_FAULTS, partial(_try, adapter, name, weight, dtype, correct))


def _read_back_correctly(adapter: Adapter, weight: Weight, dtype: torch.dtype) -> Tensor:
    """Read back the weight of the kernel without a fault; ArgumentError if a check fails."""
    kernel = partial(_gemm, adapter, adapter.pack(weight))
    failing = [check for check in REQUIRED_CHECKS if not ORACLES[check](kernel, weight, dtype)]
    result = read_back(kernel, weight.layer.K, dtype)
    if failing:
        diagnosis = diagnose(weight.dequantize(), result, weight)
        raise ArgumentError(
            "the kernel", "correct before a fault is planted", f"{', '.join(failing)}: {diagnosis.sentence}"
        )
    return result


def _try(
    adapter: Adapter, name: str, weight: Weight, dtype: torch.dtype, correct: Tensor, fault: KernelFault
) -> Iterator[KillRow]:
    try:
        packed = fault.packed(weight)
        if packed is None:
            return
        kernel = fault.gemm(partial(_gemm, adapter, adapter.pack(packed)), weight.layer.N)
    except Exception as error:  # of any class, as the adapter is not qload's
        first, *_ = str(error).splitlines() or [""]
        refused = f"{type(error).__name__}: {first}"
        yield KillRow(name, fault.name, fault.words, dict.fromkeys(ORACLES, True), None, refused)
        return
    if not torch.equal(read_back(kernel, weight.layer.K, dtype), correct):
        misread, fault_class = diagnose_kernel(kernel, weight, dtype)
        others = [check for check in ORACLES if check != READ_BACK]
        noticed = {
            READ_BACK: misread,
            **{check: not ORACLES[check](kernel, weight, dtype) for check in others},
        }
        yield KillRow(name, fault.name, fault.words, noticed, fault_class)


def _gemm(adapter: Adapter, buffers: Any, x: Tensor) -> Tensor:
    return adapter.gemm(x, buffers)


def adapter_of(target: object) -> Adapter:
    """Return an adapter, or an instance of a class of one; ArgumentError if an attribute is missing."""
    adapter: Any = target() if isinstance(target, type) else target
    missing = [name for name in ("format", "pack", "gemm") if not hasattr(adapter, name)]
    if missing:
        raise ArgumentError(
            "adapter", "format, pack(weight) and gemm(x, buffers)", f"none of {', '.join(missing)}"
        )
    result: Adapter = adapter
    return result


def passes_read_back(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Return True if one-hot inputs return the columns of the weight."""
    misread, _ = diagnose_kernel(kernel, weight, dtype)
    return not misread


def diagnose_kernel(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> tuple[bool, str | None]:
    """Return whether one-hot inputs of `dtype` read another `weight` back, and the class of the fault."""
    try:
        assert_reads_back(kernel, weight, dtype)
    except Misread as error:
        return True, error.diagnosis.fault
    except AssertionError:
        return True, None
    return False, None


def passes_derived_bound(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Return True if every result is as close as rounding allows."""
    try:
        assert_within_bound(kernel, weight, activations(weight, dtype))
    except AssertionError:
        return False
    return True


def passes_cosine(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Return True if the results have nearly the same direction."""
    got, want = _results(kernel, weight, dtype)
    return float(torch.cosine_similarity(got.flatten(), want.flatten(), 0)) > MIN_COSINE


def passes_mean_relative(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Return True if the mean error is a small part of the mean result."""
    got, want = _results(kernel, weight, dtype)
    return float((got - want).abs().mean() / want.abs().mean()) < MAX_MEAN_RELATIVE


def passes_allclose(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> bool:
    """Return True if every result is within a fifth of the exact one, or within 0.2."""
    got, want = _results(kernel, weight, dtype)
    return torch.allclose(got, want, rtol=CLOSE_TOLERANCE, atol=CLOSE_TOLERANCE)


def activations(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Normal inputs (M, K) with a standard deviation of a tenth, as in common tests of experts' kernels."""
    random = torch.Generator().manual_seed(0)
    return (torch.randn(TOKENS, weight.layer.K, generator=random) / 10).to(dtype)


def _results(kernel: Kernel, weight: Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The results of the kernel and the exact ones, float64 (M, N)."""
    x = activations(weight, dtype)
    return kernel(x).double(), x.double() @ weight.dequantize().double().T


# By name; the first two are qload's own and have to notice every fault.
ORACLES: dict[str, Oracle] = {
    READ_BACK: passes_read_back,
    "derived bound": passes_derived_bound,
    "cosine > .99": passes_cosine,
    "mean relative < .04": passes_mean_relative,
    "rtol .2 atol .2": passes_allclose,
}
REQUIRED_CHECKS = (READ_BACK, "derived bound")
