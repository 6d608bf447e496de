"""What an engine has to have, and which versions of it were tried."""

import logging
import tomllib

import pytest

from qload.engines import vllm
from qload.engines.vllm import hooks, register
from qload.errors import ArgumentError
from tests.paths import ROOT


def test_a_hook_that_is_there_is_handed_out() -> None:
    assert hooks.hook("qload.engines.vllm.hooks", "TRIED") is hooks.TRIED


def test_a_hook_that_a_version_lacks_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "9.9.9")

    with pytest.raises(ArgumentError) as refusal:
        hooks.hook("qload.engines.vllm.hooks", "register_nothing")

    assert "qload.engines.vllm.hooks.register_nothing" in str(refusal.value)
    assert "9.9.9" in str(refusal.value)


def test_what_else_is_not_installed_says_so_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_the_kind"):
        hooks.hook("nothing_of_the_kind", "name")


def test_a_version_that_was_not_tried_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: "0.1.2")
    monkeypatch.setattr(hooks, "_warned", set())

    with caplog.at_level(logging.WARNING, "qload"):
        hooks.check_version()
        hooks.check_version()

    (record,) = caplog.records
    assert "0.1.2" in record.getMessage()
    assert hooks.TRIED[0] in record.getMessage()


@pytest.mark.parametrize("version", [hooks.TRIED[0], f"{hooks.TRIED[0]}+cu130"])
def test_a_version_that_was_tried_does_not(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "installed_version", lambda: version)
    monkeypatch.setattr(hooks, "_warned", set())

    hooks.check_version()

    assert not caplog.records


def test_all_that_is_needed_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ("qload.engines.vllm.hooks", "TRIED")
    hooks.check_hooks((there, there))

    with pytest.raises(ArgumentError, match=r"hooks\.gone, such as"):
        hooks.check_hooks((there, ("qload.engines.vllm.hooks", "gone")))


def test_without_vllm_registering_says_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(hooks, "import_module", missing)

    with pytest.raises(ArgumentError, match="QUANTIZATION_METHODS"):
        register()


def test_entry_points_are_the_functions_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    names = {value.partition(":")[2] for value in declared["vllm.general_plugins"].values()}

    assert names == {*vllm.__all__}
    assert all(callable(getattr(vllm, name)) for name in names)
