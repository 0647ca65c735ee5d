"""One tiny checkpoint of each layout for the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny


@pytest.fixture(scope="session", params=sorted(tiny.MODELS))
def checkpoint_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny checkpoint, each layout in turn; tests must not change it."""
    return tiny.write(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def qwen_copy(tmp_path: Path) -> Path:
    """A tiny Qwen3-MoE checkpoint in several shards that a test may damage."""
    return tiny.write(tmp_path / "model", "qwen3_moe", max_shard_size="20KB")
