"""Tiny checkpoints, their profiles, and profiles made up with a known structure."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from tests import tiny


@dataclass(frozen=True)
class Case:
    """A checkpoint of one layout with its profile."""

    kind: str
    checkpoint: Checkpoint
    profile: ExpertProfile


def texts(n: int = 120, seed: int = 0) -> list[str]:
    """Random texts, enough that no two experts of a layer are used equally often where it matters."""
    draw = random.Random(seed)
    return ["".join(draw.choices(tiny.CHARACTERS[:-1], k=draw.randint(5, 14))) for _ in range(n)]


@pytest.fixture(scope="session", params=sorted(tiny.MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each layout in turn; tests must not change its directory."""
    path = tiny.write(tmp_path_factory.mktemp("models") / request.param, request.param)
    checkpoint = Checkpoint.open(path)
    return Case(request.param, checkpoint, profile(checkpoint, texts()))
