"""What all suites share: cases as parameters, skips with reasons, how a failure reads. Torch stays out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from qload.conformance.case import ConformanceCase
from qload.conformance.cases import TIERS, cases

ASSERTS = __debug__  # False under `python -O`


def option(config: pytest.Config, name: str, default: str) -> str:
    """The value of `--qload-NAME`; the default where the plugin is not loaded."""
    return str(config.getoption(f"qload_{name}", default=None) or default)


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """While this is open, torch has `count` threads on a CPU; then as many as before."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Suite:
    """The base of all suites: pytest collects what derives from one and is called Test...

    Attributes
    ----------
    format
        The name of a checkpoint format, as `qload formats` lists them.
    dtypes
        Of activations; the first is what most cases have.
    threads
        How many threads torch has on a CPU while a test runs. With more than one, layers as small as these
        wait for threads for longer than they compute; a CPU kernel that shares its work among them says so.
    """

    format: ClassVar[str] = ""
    dtypes: ClassVar[tuple[str, ...]] = ("float16",)
    threads: ClassVar[int] = 1

    def can_implement(self, case: ConformanceCase) -> tuple[bool, str]:
        """Whether the subject takes a `case`, and why not: what it refuses is skipped with that reason."""
        return True, ""

    @classmethod
    def cases(cls, tier: str = "default") -> tuple[ConformanceCase, ...]:
        """The cases of a `tier`, smallest first."""
        return cases(cls.format, tier, cls.dtypes)

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Each test that takes a case, of `metafunc`, runs with all of the tier that `--qload-tier` names."""
        if "case" in metafunc.fixturenames:
            found = cls.cases(option(metafunc.config, "tier", "default"))
            metafunc.parametrize("case", found, ids=[case.id for case in found])

    def test_takes_something(self, request: pytest.FixtureRequest) -> None:
        """A subject that refuses every case of its format was not tested, and so did not pass."""
        refused = {}
        for case in self.cases(option(request.config, "tier", "default")):
            taken, reason = answer_of(self, case)
            if taken:
                return
            refused[case.id] = reason
        first, why = next(iter(refused.items()))
        pytest.fail(f"all {len(refused)} cases are refused, {first} because: {why}", pytrace=False)


def answer_of(suite: Suite, case: ConformanceCase) -> tuple[bool, str]:
    """What `can_implement` of a `suite` says of a `case`; the test fails where that is no pair."""
    said: Any = suite.can_implement(case)
    if not isinstance(said, tuple) or len(said) != 2:
        pytest.fail(f"can_implement returned {said!r}, expected (whether, why not)", pytrace=False)
    return said


class Judged:
    """One test of one case: asks whether it is taken, runs it, and says of a failure what to look at.

    Parameters
    ----------
    suite
        The suite that is run.
    case
        What is asked of the subject.
    request
        Of pytest.
    make
        Makes what the checks are methods of, for a case and a device.
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
        taken, reason = answer_of(suite, case)
        self.suite, self.case, self.node, self.make = suite, case, request.node, make
        self.device = option(request.config, "device", "cpu")
        self.said: dict[str, Any] = {"case": case.id, "suite": type(suite).__name__}
        self.node.user_properties.append(("qload", self.said))
        if not taken:
            pytest.skip(reason or "the subject refuses it, and says no reason")

    def by(self, check: str) -> None:
        """Run a `check` of the trial by its name; a failure names the smallest case, and its replay."""
        __tracebackhide__ = True
        try:
            self.said.update(self._run(self.case, check) or {})
            return
        except AssertionError as error:
            failure = error  # told below, once: within this block pytest would print it too
        smallest, text = self._smallest(check, str(failure))
        self.said |= {"failure": text, "fault": getattr(getattr(failure, "diagnosis", None), "fault", None)}
        pytest.fail(f"{smallest.id}: {text}\n  replay    {self._replay(smallest)}", pytrace=False)

    def _run(self, case: ConformanceCase, check: str) -> dict[str, Any] | None:
        with threads_of_torch(self.suite.threads):
            found: dict[str, Any] | None = getattr(self.make(case, self.device), check)()
        return found

    def _smallest(self, check: str, text: str) -> tuple[ConformanceCase, str]:
        """Of alike cases the smallest that fails too, and what it says."""
        alike = [
            case
            for case in self.suite.cases(TIERS[-1] if self.case.world == 1 else TIERS[0])
            if case.traits == self.case.traits and case.N * case.K < self.case.N * self.case.K
        ]
        for case in sorted(alike, key=lambda case: (case.world, case.N * case.K)):
            if case.world == 1 and self.suite.can_implement(case)[0]:
                try:
                    self._run(replace(case, rank=0), check)
                except AssertionError as error:
                    return case, str(error)
                except pytest.skip.Exception:
                    continue
        return self.case, text

    def _replay(self, case: ConformanceCase) -> str:
        node = self.node.nodeid.replace(f"[{self.case.id}]", f"[{case.id}]")
        tier = next(name for name in TIERS if case.id in {each.id for each in self.suite.cases(name)})
        return f"pytest '{node}'{'' if tier in TIERS[:2] else f' --qload-tier={tier}'}"
