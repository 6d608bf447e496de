"""docs/engines/vllm.md says what is so."""

import tomllib

from qload.engines.vllm import hooks
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "engines" / "vllm.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SESSIONS = (ROOT / "noxfile.py").read_text()


def test_the_versions_that_were_tried_are_listed_and_installed() -> None:
    assert all(f"Version {version}" in PAGE for version in hooks.TRIED)
    assert f'"vllm=={hooks.TRIED[-1]}"' in SESSIONS


def test_the_plug_ins_are_entry_points() -> None:
    points = PROJECT["project"]["entry-points"]["vllm.general_plugins"]

    assert points == {
        "qload": "qload.engines.vllm:register",
        "qload_kernel": "qload.engines.vllm:register_kernel",
    }
    assert "VLLM_PLUGINS=qload_kernel" in PAGE
