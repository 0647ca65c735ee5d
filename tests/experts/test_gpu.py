"""The calibration pass on one GPU; skips where there is none (run this file alone on a machine with one)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeproxy.experts.profile import profile
from moeproxy.experts.statistics import ExpertProfile
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCE = 1e-6
SUMS = ("gate_LE", "saliency_LE", "context_LED", "output_LED", "output_norm_LE", "peak_LE")


def _assert_close(one: ExpertProfile, other: ExpertProfile, tolerance: float) -> None:
    np.testing.assert_array_equal(one.load_LE, other.load_LE)
    np.testing.assert_array_equal(one.choices_TLK, other.choices_TLK)
    for name in SUMS:
        a, b = getattr(one, name), getattr(other, name)
        np.testing.assert_allclose(b, a, rtol=0, atol=tolerance * np.abs(a).max(), err_msg=name)


def test_streamed_equals_ordinary_on_the_device(checkpoint_path: Path) -> None:
    ordinary, streamed = (profile(checkpoint_path, tiny.TEXTS, device="cuda", stream=how) for how in (False, True))
    _assert_close(ordinary, streamed, TOLERANCE)


def test_device_equals_processor(checkpoint_path: Path) -> None:
    processor, device = (profile(checkpoint_path, tiny.TEXTS, device=name) for name in ("cpu", "cuda"))
    _assert_close(processor, device, 1e-4)  # other kernels add in another order
