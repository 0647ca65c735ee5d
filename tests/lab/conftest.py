"""What the lab's tests share: the shipped models and a loop of a few seconds."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from moeproxy.lab.settings import GRPOSettings
from moeproxy.places import data_dir

MODELS = ("qwen3-moe-tiny", "deepseek-v3-tiny")
TOOL_MODELS = ("qwen3-moe-tools", "deepseek-v3-tools")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """Keep what is loaded out of garbage collections: accelerate runs one after every training."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def qwen3() -> Path:
    return data_dir() / "models" / "qwen3-moe-tiny"


@pytest.fixture(scope="session")
def shipped_models() -> Path:
    """Folder of both shipped models."""
    return data_dir() / "models"


@pytest.fixture(scope="session", params=MODELS)
def shipped(request: pytest.FixtureRequest) -> Path:
    return data_dir() / "models" / request.param


@pytest.fixture(scope="session")
def short() -> GRPOSettings:
    """Six steps of 4 prompts x 4 samples: about two seconds."""
    return GRPOSettings(steps=6, prompts=4, samples=4, tasks=64)
