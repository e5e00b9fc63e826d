"""One set of stages for all modules that a worker runs."""

from __future__ import annotations

import pytest

from attacks import suite


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> suite.Stages:
    """Stages of the demo model by precision, made when first used."""
    return suite.Stages(tmp_path_factory.mktemp("stages"))
