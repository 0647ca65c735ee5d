"""What every test runs under: one thread, fixed seeds, no network beyond this machine."""

from __future__ import annotations

import os

# Before anything imports numpy or torch: they read these once. The processes that tests start inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    JUPYTER_PLATFORM_DIRS="1",
)

import contextlib
import random
import socket
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import numpy as np
import pytest

from tests.scheduling import ByGroup, place_of

# The same examples every time: what fails here fails everywhere.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable")

_connect = socket.socket.connect
_LOOPBACK = ("127.", "::1", "localhost")


def _connect_here_only(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOOPBACK):
        raise RuntimeError(f"a test tried to reach {address[0]}: tests must run without a network")
    _connect(self, address)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests that take longest begin first: what begins last must be short."""
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    """Give the tests of a group to one process."""
    return ByGroup(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let no two jobs of several processes run at once on this machine: each alone keeps two cores busy.

    A test waits before its time limit begins to count.
    """
    with _alone() if item.get_closest_marker("job") else contextlib.nullcontext():
        return (yield)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    import fcntl  # not on Windows, where there are no such jobs

    with open(Path(tempfile.gettempdir()) / f"moeproxy-tests-{os.getuid()}.lock", "w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(stream, fcntl.LOCK_UN)  # also for a process that was forked meanwhile and still is there


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse every connection that leaves this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _connect_here_only)
        yield


@pytest.fixture(autouse=True)
def seeds() -> None:
    """Fix the global generators; library code takes its seeds as arguments."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - third parties draw from the legacy generator
    # torch only where a test already paid for it: most tests run without.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def types(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check annotations at run time, but for tests of what users see without that check."""
    unchecked = request.node.get_closest_marker("bad_types") is not None
    jaxtyping.config.update("jaxtyping_disable", unchecked)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
