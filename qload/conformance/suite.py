"""The base of all suites: cases as parameters, skips with reasons, and reports of failures, without torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from qload.conformance.cases import TIERS, ConformanceCase, cases

ASSERTS = __debug__  # False under `python -O`


def option(config: pytest.Config, name: str, default: str) -> str:
    """Return the value of `--qload-NAME`, or the default without the plugin."""
    return str(config.getoption(f"qload_{name}", default=None) or default)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads of torch, and restore it at the end."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def error_prefix(text: str) -> Iterator[None]:
    """Put a `text` before the message of a failed assertion."""
    try:
        yield
    except AssertionError as error:
        error.args = (f"{text}{error}", *error.args[1:])
        raise


class Suite:
    """The base of all suites: pytest collects subclasses whose name begins with Test.

    Attributes
    ----------
    format
        The name of a checkpoint format, as in `qload formats`.
    dtypes
        Of activations; most cases have the first.
    threads
        The number of CPU threads of torch during a test. With more than one, layers as small as these wait
        for threads longer than they compute; a kernel that uses several threads sets more.
    """

    format: ClassVar[str] = ""
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
        self.report: dict[str, Any] = {"case": case.id, "suite": type(suite).__name__}
        self.node.user_properties.append(("qload", self.report))
        if not supported:
            pytest.skip(reason or "the subject refuses it without a reason")

    def check(self, name: str) -> None:
        """Run the check of this `name`; the report of a failure names the smallest case and its replay."""
        __tracebackhide__ = True
        try:
            self.report.update(self._run(self.case, name) or {})
            return
        except AssertionError as error:
            failure = error  # raised below: within this block pytest would print it too
        smallest, text = self._smallest(name, str(failure))
        self.report |= {
            "failure": text,
            "fault": getattr(getattr(failure, "diagnosis", None), "fault", None),
        }
        pytest.fail(f"{smallest.id}: {text}\n  replay    {self._replay(smallest)}", pytrace=False)

    def _run(self, case: ConformanceCase, name: str) -> dict[str, Any] | None:
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
