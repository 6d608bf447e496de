"""Suites of tests for kernels of linear layers and of experts, for loaders and for packers, without torch.

Their base has cases as parameters, skips with reasons, and reports of failures.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest

from qload.conformance.cases import MAIN, SMALL, TIERS, ConformanceCase, cases, check_tier
from qload.testing.traits import contract

ASSERTS = __debug__  # False under `python -O`


def option(config: pytest.Config, name: str, default: str) -> str:
    """Return the value of `--qload-NAME`, or the default without the plugin."""
    return str(config.getoption(f"qload_{name}", default=None) or default)


class Suite:
    """The base of all suites: pytest collects subclasses whose name begins with Test.

    Attributes
    ----------
    format
        The name of a checkpoint format, as in `qload formats`.
    subject, package
        What is tested, for reports: the name of a function or class, by default of the suite; and its
        distribution, whose version reports have.
    dtypes
        Of activations; most cases have the first.
    threads
        The number of CPU threads of torch during a test. With more than one, layers as small as these wait
        for threads longer than they compute; a kernel that uses several threads sets more.
    """

    format: ClassVar[str] = ""
    subject: ClassVar[str] = ""
    package: ClassVar[str] = ""
    dtypes: ClassVar[tuple[str, ...]] = ("float16",)
    threads: ClassVar[int] = 1

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        """Return whether the subject supports a `case`, and the reason if not; such a case is skipped."""
        return True, ""

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """Return the cases of a `tier`, smallest first."""
        return cases(cls.format, tier, cls.dtypes)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Run each test of `metafunc` with a case parameter on all cases of the tier of `--qload-tier`."""
        if "case" in metafunc.fixturenames:
            listed = cls.cases(option(metafunc.config, "tier", "default"))
            metafunc.parametrize("case", listed, ids=[case.id for case in listed])

    def test_takes_something(self, request: pytest.FixtureRequest) -> None:
        """Fail if the subject refuses every case of its format, and so is not tested at all."""
        refused = {}
        for case in self.cases(option(request.config, "tier", "default")):
            supported, reason = ask_support(self, case)
            if supported:
                return
            refused[case.id] = reason
        first, why = next(iter(refused.items()))
        pytest.fail(f"all {len(refused)} cases are refused, {first} because: {why}", pytrace=False)


def _describe(suite: Suite) -> dict[str, str]:
    """Return the entries of a report that describe the subject of a `suite`."""
    kind = next(base.__name__ for base in type(suite).__mro__ if base.__module__ == __name__)
    described = {"kind": kind, "subject": suite.subject or type(suite).__name__}
    if not suite.package:
        return described
    try:
        version = metadata.version(suite.package)
    except metadata.PackageNotFoundError:  # the test may skip
        version = ""
    return {**described, "package": suite.package, "version": version}


def ask_support(suite: Suite, case: ConformanceCase) -> tuple[bool, str]:
    """Return `can_implement` of a `suite` for a `case`; the test fails if that is not a pair."""
    answer: Any = suite.can_implement(case)
    if not isinstance(answer, tuple) or len(answer) != 2:
        pytest.fail(f"can_implement returned {answer!r}, expected (whether, why not)", pytrace=False)
    return answer


class CaseRun:
    """The checks of one case: skips an unsupported case, and reports a failure with its smallest case.

    Parameters
    ----------
    suite
        The suite of the case.
    case
        The case.
    request
        Of pytest.
    make
        Function of a case and a device that returns the object with the checks as methods.
    """

    def __init__(
        self,
        suite: Suite,
        case: ConformanceCase,
        request: pytest.FixtureRequest,
        make: Callable[[ConformanceCase, str], Any],
    ) -> None:
        if not ASSERTS:
            pytest.fail("python -O leaves out assert statements, and so some of the checks", pytrace=False)
        supported, reason = ask_support(suite, case)
        self.suite, self.case, self.node, self.make = suite, case, request.node, make
        self.device = option(request.config, "device", "cpu")
        self.report: dict[str, Any] = {"case": case.id, "suite": type(suite).__name__, **_describe(suite)}
        self.node.user_properties.append(("qload", self.report))
        if not supported:
            pytest.skip(reason or "the subject refuses it without a reason")

    def check(self, name: str) -> None:
        """Run the check of this `name`; the report of a failure names the smallest case and its replay."""
        try:
            self.report.update(self._run(self.case, name) or {})
            return
        except AssertionError as error:
            failure = error  # raised below: within this block pytest would print it too
        smallest, text = self._smallest(name, str(failure))
        replay = self._replay(smallest)
        self.report |= {
            "failure": text,
            "fault": getattr(getattr(failure, "diagnosis", None), "fault", None),
            "replay": replay,
        }
        pytest.fail(f"{smallest.id}: {text}\n  replay    {replay}", pytrace=False)

    def _run(self, case: ConformanceCase, name: str) -> dict[str, Any] | None:
        from qload.verify.workers import torch_threads

        with torch_threads(self.suite.threads):
            result: dict[str, Any] | None = getattr(self.make(case, self.device), name)()
        return result

    def _smallest(self, name: str, text: str) -> tuple[ConformanceCase, str]:
        """The smallest case of the same traits that fails too, and its message."""
        similar = [
            case
            for case in self.suite.cases(TIERS[-1] if self.case.world == 1 else TIERS[0])
            if case.traits == self.case.traits and case.N * case.K < self.case.N * self.case.K
        ]
        for case in sorted(similar, key=lambda case: (case.world, case.N * case.K)):
            if case.world == 1 and self.suite.can_implement(case)[0]:
                try:
                    self._run(replace(case, rank=0), name)
                except AssertionError as error:
                    return case, str(error)
                except pytest.skip.Exception:
                    continue
        return self.case, text

    def _replay(self, case: ConformanceCase) -> str:
        node = self.node.nodeid.replace(f"[{self.case.id}]", f"[{case.id}]")
        tier = next(name for name in TIERS if case.id in {each.id for each in self.suite.cases(name)})
        return f"pytest '{node}'{'' if tier in TIERS[:2] else f' --qload-tier={tier}'}"


class LinearKernelSuite(Suite):
    """Tests of a kernel y = x @ w.T with a quantized weight w (N, K): derive, and define how to call it.

    Attributes
    ----------
    format, dtypes, threads
        As in `Suite`.
    accumulate, split_k, partials, scales
        How the kernel adds, as in `qload.testing.derived_bound`, with dtypes by name; None: it rounds no
        scales.
    borders
        Numbers of tokens at which it dispatches differently; () for those of known kernels.
    deterministic
        Whether it gives the same bits twice.

    Examples
    --------
    >>> from qload.conformance import LinearKernelSuite
    >>> class TestPlain(LinearKernelSuite):
    ...     format = "unquantized"
    ...     def pack(self, weight):
    ...         return weight.weight
    ...     def gemm(self, x, buffers):
    ...         return (x.float() @ buffers.float().T).to(x.dtype)
    >>> [case.id for case in TestPlain.cases("smoke")]
    ['unquantized.w16.k256n128']
    """

    accumulate: ClassVar[str] = "float32"
    split_k: ClassVar[int] = 1
    partials: ClassVar[str] = "float32"
    scales: ClassVar[str | None] = None
    borders: ClassVar[tuple[int, ...]] = ()
    deterministic: ClassVar[bool] = True

    @abstractmethod
    def pack(self, weight: Any) -> Any:
        """Return the buffers for `gemm` from a typed `weight` such as `qload.GPTQWeight`."""

    @abstractmethod
    def gemm(self, x: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K) and the `buffers` of `pack` -> y (M, N) in the dtype of x."""

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.linear_checks import LinearChecks

        return CaseRun(self, case, request, lambda case, device: LinearChecks(self, case, device))

    def test_reads_back(self, trial: CaseRun) -> None:
        """One-hot inputs return the weight, to the bit: `trial`."""
        trial.check("reads_back")

    def test_sums_exactly(self, trial: CaseRun) -> None:
        """Small integers sum exactly, for numbers of tokens around every border: `trial`."""
        trial.check("sums_exactly")

    def test_stays_within_the_bound(self, trial: CaseRun) -> None:
        """Random numbers have at most the error of rounding: `trial`."""
        trial.check("stays_within_the_bound")

    def test_says_the_same_twice(self, trial: CaseRun) -> None:
        """Two calls give the same bits, independent of the memory of y: `trial`."""
        trial.check("says_the_same_twice")

    def test_keeps_to_its_buffers(self, trial: CaseRun) -> None:
        """The kernel reads nothing beyond its buffers and x, and writes to neither: `trial`."""
        trial.check("keeps_to_its_buffers")

    def test_rows_do_not_mix(self, trial: CaseRun) -> None:
        """A token of NaN affects no other: `trial`."""
        trial.check("rows_do_not_mix")

    def test_packing_leaves_the_weight_alone(self, trial: CaseRun) -> None:
        """Packing does not write to the weight, and is the same each time: `trial`."""
        trial.check("packing_leaves_the_weight_alone")


class ExpertsKernelSuite(Suite):
    """Tests of y = sum of w * down(act(gate(x)) * up(x)) over the experts of each token: derive from it.

    A case has K inputs of a token, and N between gate and down.

    Attributes
    ----------
    experts, chosen
        The number of experts, and the number that each token chooses.
    activation
        Between gate and up: "silu", "gelu" or "gelu_tanh".
    between
        The type, by name, of the rounding between gate and down; None: that of x on a GPU, float32 elsewhere.

    Examples
    --------
    >>> from qload.conformance import ExpertsKernelSuite
    >>> class TestMine(ExpertsKernelSuite):
    ...     format = "gptq"
    ...     def pack(self, experts):
    ...         return my_repack(experts.gate_up, experts.down)  # doctest: +SKIP
    ...     def gemm(self, x, ids, weights, buffers):
    ...         return my_fused_moe(x, *buffers, weights, ids)  # doctest: +SKIP
    """

    experts: ClassVar[int] = 4
    chosen: ClassVar[int] = 2
    activation: ClassVar[Any] = "silu"
    between: ClassVar[str | None] = None

    @abstractmethod
    def pack(self, experts: Any) -> Any:
        """Return the buffers for `gemm` from typed `experts`, a `qload.ExpertsWeight`."""

    @abstractmethod
    def gemm(self, x: Any, ids: Any, weights: Any, buffers: Any) -> Any:
        """Call the kernel: x (M, K), `ids` and `weights` (M, chosen), `buffers` of `pack` -> y (M, K)."""

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """Return the cases of a `tier`, smallest first."""
        check_tier(tier)
        sizes = [SMALL] if tier == "smoke" else [SMALL, MAIN]
        return tuple(
            ConformanceCase(**(asdict(traits) | {"dtype": dtype}), K=K, N=N, M=33)
            for K, N in sizes
            for dtype in cls.dtypes
            for traits in contract(cls.format).corners(cls.format)
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.expert_checks import ExpertChecks

        return CaseRun(self, case, request, lambda case, device: ExpertChecks(self, case, device))

    def test_each_expert_alone(self, trial: CaseRun) -> None:
        """Tokens of one expert, for each of them: `trial`."""
        trial.check("each_expert_alone")

    def test_stays_within_the_bound(self, trial: CaseRun) -> None:
        """Tokens of random experts have at most the error of rounding: `trial`."""
        trial.check("stays_within_the_bound")

    def test_rows_do_not_mix(self, trial: CaseRun) -> None:
        """A token of NaN affects no other: `trial`."""
        trial.check("rows_do_not_mix")

    def test_keeps_to_its_buffers(self, trial: CaseRun) -> None:
        """The kernel reads nothing beyond its buffers and inputs, and writes to none of them: `trial`."""
        trial.check("keeps_to_its_buffers")


SIZES = {"K": 512, "N": 1024}  # of a hidden state, and between the layers of a block
DAMAGES = ("cut-short", "scales-missing", "wrong-shape")


class LoaderSuite(Suite):
    """Tests of loaders of a rank's share of a checkpoint's files: derive, and define how to call it.

    The checkpoint has `model.layers.0.self_attn.q_proj` and `model.layers.0.mlp.up_proj`, split along their
    outputs, and `o_proj` and `down_proj`, split along their inputs.

    Examples
    --------
    >>> from qload.conformance import LoaderSuite
    >>> class TestMine(LoaderSuite):
    ...     format = "gptq"
    ...     def load(self, files, rank, world):
    ...         return my_load(files, rank, world)  # doctest: +SKIP
    >>> [case.id for case in TestMine.cases("smoke")]
    ['gptq.v1.w4.g128.k512n1024', 'gptq.v1.w4.g128.k512n1024.tp2']
    """

    @abstractmethod
    def load(self, files: list[Path], rank: int, world: int) -> Any:
        """Return the share of `rank` in a `world` of ranks: stored tensors by full name.

        `files`: safetensors files; `config.json` is in their folder. Raise an error for an impossible split.
        """

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """Return the cases of a `tier`: whole layers first, then those of two, four and eight ranks."""
        check_tier(tier)
        allowed, smoke = contract(cls.format), tier == "smoke"
        traits = [allowed.common(cls.format)] if smoke else allowed.corners(cls.format)
        return tuple(
            ConformanceCase(**{**asdict(replace(each, dtype=dtype)), **SIZES, "world": world})
            for world in ((1, 2) if smoke else (1, 2, 4, 8))
            for dtype in cls.dtypes
            for each in traits
        )

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest, tmp_path: Path) -> CaseRun:
        """The run of the `case`, with files under pytest's `tmp_path`."""
        from qload.conformance.loader_checks import LoaderChecks

        return CaseRun(self, case, request, lambda case, device: LoaderChecks(self, case, tmp_path))

    def test_shares_are_exact(self, trial: CaseRun) -> None:
        """Every rank gets its part of every stored tensor, or all refuse: `trial`."""
        trial.check("shares_are_exact")

    def test_several_files_are_one(self, trial: CaseRun) -> None:
        """The same tensors in several files with an index give the same shares: `trial`."""
        trial.check("several_files_are_one")

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damage_is_refused(self, trial: CaseRun, damage: str) -> None:
        """A truncated file, and one with too few scales or none, raises an error: `trial`, `damage`."""
        trial.check(f"{damage.replace('-', '_')}_is_refused")


class PackerSuite(Suite):
    """Tests of a writer of the tensors of a format: derive, and define how to call it.

    Examples
    --------
    >>> from qload.conformance import PackerSuite
    >>> class TestMine(PackerSuite):
    ...     format = "gptq"
    ...     def pack(self, codes, case):
    ...         return {"qweight": my_pack(codes.codes, case.bits)}  # doctest: +SKIP
    """

    @abstractmethod
    def pack(self, codes: Any, case: ConformanceCase) -> Any:
        """Return some or all tensors of a layer by field, such as `qweight`, from plain `codes` of a `case`.

        `codes` has `codes` (N, K), integers from 0; `scales` and `zeros` (N, G), or None for no zero points;
        and `k_group` (K,), the group of each input, or None for a single group. Other fields are not checked.
        """

    def unpack(self, tensors: Any, case: ConformanceCase) -> Any:
        """Return the codes (N, K) of a layer's `tensors` by field, of a `case`; None if it only packs."""
        return None

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.packer_checks import PackerChecks

        return CaseRun(self, case, request, lambda case, device: PackerChecks(self, case))

    def test_packs_to_the_bit(self, trial: CaseRun) -> None:
        """Every returned tensor equals that of the format's owner: `trial`."""
        trial.check("packs_to_the_bit")

    def test_unpacks_what_is_stored(self, trial: CaseRun) -> None:
        """Stored tensors are unpacked to their codes: `trial`."""
        trial.check("unpacks_what_is_stored")

    def test_the_codes_are_left_alone(self, trial: CaseRun) -> None:
        """Packing does not write to its arguments: `trial`."""
        trial.check("the_codes_are_left_alone")


class WriterSuite(Suite):
    """Tests of a quantizer: its saved tensors mean the weight that it computed; derive from it.

    Attributes
    ----------
    optional
        Fields that `write` may leave out, such as `g_idx` of groups in order.

    Examples
    --------
    >>> from qload.conformance import WriterSuite
    >>> class TestMine(WriterSuite):
    ...     format = "gptq"
    ...     def write(self, weight, case):
    ...         return my_quantizer(weight, case.bits, case.group_size)  # doctest: +SKIP
    """

    optional: ClassVar[tuple[str, ...]] = ("g_idx", "weight_g_idx")

    @abstractmethod
    def write(self, weight: Any, case: ConformanceCase) -> Any:
        """Quantize a `weight` (N, K) as `case` states; return tensors by field, and their meaning (N, K)."""

    @pytest.fixture
    def trial(self, case: ConformanceCase, request: pytest.FixtureRequest) -> CaseRun:
        """The run of the `case`."""
        from qload.conformance.writer_checks import WriterChecks

        return CaseRun(self, case, request, lambda case, device: WriterChecks(self, case))

    def test_writes_what_it_means(self, trial: CaseRun) -> None:
        """The saved tensors stand for the weight that the quantizer computed: `trial`."""
        trial.check("writes_what_it_means")

    def test_the_weight_is_left_alone(self, trial: CaseRun) -> None:
        """Quantizing does not write to its argument: `trial`."""
        trial.check("the_weight_is_left_alone")
