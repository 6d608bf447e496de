"""The kernels of docs/conformance/contracts.md pass; a bug in the text of one is caught, and named."""

from typing import Any

import pytest

from qload.conformance import LinearKernelSuite
from qload.conformance.linear_checks import LinearChecks
from qload.testing.checks import Misread
from tests.page_files import files
from tests.paths import ROOT

KERNELS = files(ROOT / "docs" / "conformance" / "contracts.md")
CHECKS = ("reads_back", "sums_exactly", "stays_within_the_bound", "keeps_to_its_buffers")


def suite(text: str) -> LinearKernelSuite:
    """The one that a block of the page defines."""
    held: dict[str, Any] = {}
    exec(text, held)
    (made,) = (value for name, value in held.items() if name.startswith("Test"))
    return made()  # type: ignore[no-any-return]


def on_trial(text: str, check: str, tier: str = "smoke") -> int:
    """How many cases of a tier the kernel takes, each of which passes."""
    subject = suite(text)
    taken = [case for case in subject.cases(tier) if subject.can_implement(case)[0]]
    for case in taken:
        try:
            getattr(LinearChecks(subject, case, "cpu"), check)()
        except pytest.skip.Exception:
            continue  # of sums that float32 cannot hold
    return len(taken)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_kernel_of_the_page_passes(name: str, check: str) -> None:
    assert on_trial(KERNELS[name], check) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_of_the_page_passes_the_default_tier(name: str) -> None:
    for check in CHECKS:
        assert on_trial(KERNELS[name], check, "default") > 3


SYMMETRIC, ORDER, V2, AWQ, NF4, FP8 = (f"test_{name}.py" for name in (
    "gptq_symmetric", "gptq_act_order", "gptq_v2", "awq", "nf4", "fp8_block"))  # fmt: skip
# What is written instead of what, in which kernel, and the class that is named.
BUGS: dict[str, tuple[str, str, str, str]] = {
    "7 is the middle": (SYMMETRIC, "codes - 8", "codes - 7", "zero-points-one-lower"),
    "codes from the high bits": (
        SYMMETRIC, "arange(0, 32, 4)", "arange(28, -1, -4)", "code-order"),
    "no zero points": (SYMMETRIC, "(codes - 8) *", "codes *", "zero-points-missing"),
    "scales divide": (SYMMETRIC, "(codes - 8) *", "(codes - 8) /", "scales-inverted"),
    "the group before": (
        SYMMETRIC, "scales.float().repeat", "scales.float().roll(1, 0).repeat", "scales-of-another-group"),
    "the zero point as stored": (ORDER, ".flatten(1) + 1", ".flatten(1)", "zero-points-one-lower"),
    "groups in order": (
        ORDER, "weight.g_idx.long()", "weight.g_idx.long().sort()[0]", "act-order-ignored"),
    "one more than stored": (V2, ".flatten(1)\n", ".flatten(1) + 1\n", "zero-points-one-higher"),
    "zero points of the next output": (
        V2, "& 15).flatten(1)\n", "& 15).flatten(1).roll(-1, 1)\n", "zero-points-of-another-output"),
    "AWQ's words in order": (AWQ, "[0, 4, 1, 5, 2, 6, 3, 7]", "[0, 1, 2, 3, 4, 5, 6, 7]", "code-order"),
    "AWQ's order the other way": (AWQ, "[0, 4, 1, 5, 2, 6, 3, 7]", "[0, 2, 4, 6, 1, 3, 5, 7]", "code-order"),
    "zero points twice": (
        AWQ, "(codes - zeros.repeat", "(codes - 2 * zeros.repeat", "zero-points-twice"),
    "the low nibble first": (NF4, "[flat >> 4, flat & 15]", "[flat & 15, flat >> 4]", "code-order"),
    "no absmax": (NF4, " * absmax.repeat_interleave(block)", "", "scales-missing"),
    "blocks turned": (
        FP8, "weight.weight_scale\n", "weight.weight_scale.T.reshape(weight.weight_scale.shape)\n",
        "scales-transposed"),
    "the first block of each row": (
        FP8, "weight, scales = buffers", "weight, scales = buffers[0], buffers[1][:, :1].expand(-1, 4)",
        "scales-of-the-first"),
    "outputs one on": (
        FP8, ".float().T).to(x.dtype)", ".float().T).to(x.dtype).roll(1, 1)", "outputs-shifted"),
}  # fmt: skip


def named(subject: LinearKernelSuite) -> tuple[str, ...]:
    """The classes of what is wrong with the first case that does not read back: the likeliest first."""
    for case in subject.cases("default"):
        if subject.can_implement(case)[0] and case.world == 1:
            try:
                LinearChecks(subject, case, "cpu").reads_back()
            except Misread as error:
                return str(error.diagnosis.fault), *error.diagnosis.also
    return ()


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_kernel_is_named(bug: str) -> None:
    name, right, wrong, fault = BUGS[bug]

    assert KERNELS[name].count(right) == 1
    told = named(suite(KERNELS[name].replace(right, wrong)))
    assert fault in (told if bug == "the first block of each row" else told[:1])  # of two blocks it is a tie


def test_a_failure_lists_what_gives_the_same_numbers() -> None:
    subject = suite(KERNELS[SYMMETRIC].replace("codes - 8", "codes - 7"))

    with pytest.raises(
        Misread, match=r"\n  cause     zero points one lower .*\n  or        zero-points-ignored: the"
    ):
        LinearChecks(subject, subject.cases("smoke")[0], "cpu").reads_back()


def test_a_kernel_of_the_page_is_named_nothing() -> None:
    assert named(suite(KERNELS[SYMMETRIC])) == ()
