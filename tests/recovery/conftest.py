"""What tests of whole jobs share."""

from __future__ import annotations

from multiprocessing import forkserver
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Let hot swap start the fork server: one that other tests left has not imported what ranks need.

    Each rank then imports for itself, ten seconds of processor time.
    """
    server: Any = forkserver
    server._forkserver._stop()  # made for tests; nothing happens when none runs
