"""The room's public names resolve, and judging needs neither torch nor Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moeproxy import recovery

# Imports where torch and Ray cannot be imported.
_WITHOUT = """
import sys
class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ray", "transformers", "torchft", "nvidia_resiliency_ext"}:
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Ban())
from moeproxy import recovery
print(recovery.ettr, recovery.expected, recovery.verify, recovery.read_events, recovery.RolePlan)
"""


@pytest.mark.parametrize("name", recovery.__all__)
def test_public_name_resolves_and_is_documented(name: str) -> None:
    assert getattr(recovery, name).__doc__
    assert name in dir(recovery)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = recovery.nonsense


def test_events_are_judged_without_torch_and_ray() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
