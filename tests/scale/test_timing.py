"""Ranges of seconds: by hand for a made device, and around a real recorded run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeproxy.errors import ScaleError
from moeproxy.proxy.hardware import DEVICES, Device
from moeproxy.scale import Recording, device_time, recorded_time
from moeproxy.scale.recording import write_index
from moeproxy.scale.timing import StepTime, likely
from tests.scale.made import made_emulation

MADE = Device("made", 80, 1000, 3, 100, 10, 8, "by hand")


def test_seconds_by_hand() -> None:
    found = device_time(made_emulation(), MADE, utilisation=(0.25, 0.5), links=(0.5, 1.0), latency=(1e-3, 2e-3))
    # 10^15 operations at 10^15 a second.
    assert found.compute == (pytest.approx(2.0), pytest.approx(4.0))
    # Gathering: 15/16 of 8 GB leave over the network of 10 GB/s, twice; reducing: twice 15/16 of 1 GB. The exchange
    # stays in the node: 3/4 of 4 GB at 100 GB/s. Latency: 4 doublings of 16 ranks three times, 2 of 4 ranks; one rank
    # communicates with nobody.
    bytes_s = 2 * 0.75 + 0.1875 + 0.03
    assert found.communication == (pytest.approx(bytes_s + 14e-3), pytest.approx(2 * bytes_s + 28e-3))
    assert found.total == (pytest.approx(2.0), pytest.approx(4.0 + 2 * bytes_s + 28e-3))
    assert "made" in repr(found)
    assert "25% to 50%" in found.basis


def test_measured_computing_takes_the_place_of_counted() -> None:
    found = device_time(made_emulation(), MADE, compute=(0.4, 0.2, 0.8))
    # Logarithms to base 2 with deviation 1 around 0.4; Student's 95 % for two degrees of freedom is 4.3027.
    reach = 2 ** (4.3027 * (4 / 3) ** 0.5)
    assert found.compute == (pytest.approx(0.4 / reach, rel=1e-3), pytest.approx(0.4 * reach, rel=1e-3))
    assert "95% range of 3 measured steps" in found.basis
    with pytest.raises(ScaleError, match=r"0\.2, 0\.3.*3 steps or more"):
        device_time(made_emulation(), MADE, compute=(0.2, 0.3))


def test_a_range_holds_as_many_further_steps_as_it_says() -> None:
    draw = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        *seen, further = np.exp(draw.normal(size=6))
        low, high = likely(seen)
        held += low <= further <= high
    assert 0.935 < held / 2000 < 0.965


def test_what_can_hide_hides_at_the_low_end() -> None:
    found = StepTime((1.0, 2.0), (3.0, 5.0), "made up", "nothing")
    assert found.total == (3.0, 7.0)


@pytest.mark.parametrize(
    "wrong", [{"utilisation": (0.5, 0.2)}, {"links": (0.5, 1.5)}, {"latency": (0.0, 1.0)}, {"utilisation": (0.0, 0.5)}]
)
def test_a_range_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScaleError, match=next(iter(wrong))):
        device_time(made_emulation(), MADE, **wrong)


def test_computing_that_is_no_number_is_refused() -> None:
    with pytest.raises(ScaleError, match=r"measured seconds 1, 2, nan.*each finite"):
        device_time(made_emulation(), MADE, compute=(1.0, 2.0, float("nan")))


def test_a_device_may_be_named_and_what_is_not_counted_is_said() -> None:
    found = device_time(made_emulation(), "H100")
    assert found == device_time(made_emulation(), DEVICES["H100"])
    assert "memory-bound work (optimizer, logits) is in neither end" in repr(found)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"losses": []}, "losses of 0 ranks"),
        ({"losses": [[1.0], [1.0]]}, r"losses of rank 0 are \(1.0,\)"),
        ({"seconds": [["a", "b"]] * 2}, "seconds of rank 0"),
        ({"weights": [1, 2]}, "weights of rank 0 are 1"),
        ({"checksums": ["one"]}, "checksums of 1 ranks"),
        ({"provenance": {}}, "names no machine"),
        *(({"steps": steps}, "steps|losses") for steps in ("5", 0, -1, 3)),
    ],
)
def test_a_damaged_index_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    each: dict[str, Any] = {name: [[1.0, 2.0]] * 2 for name in ("losses", "logprobs", "seconds")}
    whole = {"program": made_emulation().program, "world": 2, "ep": 1, "steps": 2, **each, "weights": ["", ""]}
    whole |= {"provenance": {"machine": "a box"}, "checksums": ["one", "two"]}
    write_index(tmp_path, **whole)
    assert Recording.open(tmp_path).steps == 2
    write_index(tmp_path, **{**whole, **wrong})
    with pytest.raises(ScaleError, match=f"the recording is damaged: .*({said}).*Expected: .*record the run again"):
        Recording.open(tmp_path)


def test_recorded_seconds_are_summed_by_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from moeproxy.scale.backends import Event
    from moeproxy.scale.recording import write_log

    program = made_emulation().program
    runs = {"losses": [[0.0] * 5] * 2, "logprobs": [[0.0] * 5] * 2, "weights": [""] * 2}
    runs["seconds"] = [[9.0, 1.0, 1.5, 1.1, 1.2]] * 2
    write_index(tmp_path, program=program, world=2, ep=1, steps=5, provenance={"machine": "a box"}, **runs)
    spent = (5.0, 4.0, 0.1, 0.2, 0.3, 0.3, 0.15, 0.15, 0.2, 0.4)
    events = [Event("allreduce", seconds, [torch.zeros(1)]) for seconds in spent]
    write_log(tmp_path / "rank-0.safetensors", {"0,1#1": events})
    recording = Recording.open(tmp_path)
    assert recording.communication(0) == pytest.approx((9.0, 0.3, 0.6, 0.3, 0.6))
    replay = {"level": "replay", "world": 2, "ep": 1, "rank": 0, "losses": (0.0,) * 5}
    alone = made_emulation(**replay, seconds=(7.0, 0.8, 0.8, 0.8))
    found = recorded_time(recording, alone)
    assert found.compute == (pytest.approx(0.8), pytest.approx(0.8))
    assert found.measured == (1.0, 1.5)
    # Student's 95 % for three degrees of freedom is 3.1824; the logarithms to base 2 deviate by 1 / sqrt(3).
    reach = 3.1824 * (1 + 1 / 4) ** 0.5 / 3**0.5
    assert found.communication == (
        pytest.approx(0.3 * 2 ** (0.5 - reach), rel=1e-3),
        pytest.approx(0.3 * 2 ** (0.5 + reach), rel=1e-3),
    )
    assert "3 steps computed alone and of 4 steps" in found.basis
    with pytest.raises(ScaleError, match=r"5 or more.*record more steps"):
        recorded_time(recording, made_emulation(**replay, seconds=(7.0, 0.8, 0.8)))
    assert found.machine == "a box"
    for other in ({"level": "fake"}, {"losses": (0.1,) * 5}, {"losses": (0.0,)}, {"program": {**program, "seed": 7}}):
        with pytest.raises(ScaleError, match="no replay"):
            recorded_time(recording, replace(alone, **other))
    write_log(tmp_path / "rank-0.safetensors", {"0,1#1": events[:-1]})
    with pytest.raises(ScaleError, match="as many in every step"):
        recording.communication(0)
