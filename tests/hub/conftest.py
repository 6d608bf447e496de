"""A hub on this machine, in place of the one on the network, and an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.server import Hub, Model, serving
from tests.paths import FIXTURES
from tests.verify import damage

SOUND = FIXTURES / "gptq" / "model_g32_desc_act"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """`org/sound` and `org/damaged`, a model of the demo and a copy whose zero points are off by one."""
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    from huggingface_hub import constants

    case = damage.read_case(SOUND)
    damage.asymmetric_zeros_off(case)
    with serving() as served:
        served.models["org/sound"] = Model.of(SOUND)
        served.models["org/damaged"] = Model.of(damage.write_case(case, tmp_path / "damaged"))
        template = served.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("qload.hub.RETRY_PAUSES_S", (0.0, 0.0))
        monkeypatch.chdir(tmp_path)
        yield served
