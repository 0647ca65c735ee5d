"""The scale panel: settings to ranks, bars, slices in the background, refusals. Emulations are made up here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import moeproxy.view.apps.scale_work as work
from moeproxy.errors import ScaleError
from moeproxy.experts.published import DEEPSEEK_V3
from moeproxy.scale import GRPOProgram, Routing, estimate
from moeproxy.scale.processes import Cancelled
from moeproxy.view.apps.scale import ScalePanel
from moeproxy.view.apps.scale_settings import recorded
from tests.scale.conftest import TINY
from tests.scale.made import made_emulation

MODELS = {"tiny": {**TINY, "num_hidden_layers": 6}, "DeepSeek-V3": DEEPSEEK_V3}


class Emulator:
    """Stands for `emulate`: notes what is asked for; `hold` keeps it busy until it is given up."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, int]] = []
        self.searched: list[int] = []
        self.hold = threading.Event()
        self.error: Exception | None = None

    def __call__(self, program: GRPOProgram, world: int, ep: int, rank: int, _: Routing, **options: Any) -> Any:
        self.asked.append((program.n_layers, program.n_experts, world, rank))
        if self.error:
            raise self.error
        while self.hold.is_set():
            if options["cancel"].is_set():
                raise Cancelled("stopped on request")
            time.sleep(0.01)
        return made_emulation(world=world, ep=ep, rank=rank, program=program.to_dict())

    def find(self, program: GRPOProgram, world: int, ep: int, routing: Routing, **options: Any) -> Any:
        """Stands for `find_hottest`: rank 1 in a slice, rank 2 in whole depth."""
        assert options["timeout"] > 0
        self.searched.append(program.n_layers)
        return self(program, world, ep, 1 if program.n_layers == 4 else 2, routing, **options)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    made = Emulator()
    monkeypatch.setattr(work, "emulate", made)
    monkeypatch.setattr(work, "find_hottest", made.find)
    yield made
    made.hold.clear()


def panel_of(**changes: Any) -> ScalePanel:
    wanted: dict[str, Any] = {"models": MODELS, "world": 16, "ep": 4, "tokens": 256, "n_keep": 4}
    return ScalePanel("tiny", **(wanted | changes))


def test_bars_are_the_sum_and_the_slice_is_emulated(emulator: Emulator) -> None:
    panel = panel_of(rank=2)
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    assert [bar.label for bar in panel.view.bars] == [
        "original, rank 2",
        "original, rank 0 (hottest)",
        "proxy-4, rank 2",
        "proxy-4, rank 0 (hottest)",
    ]
    program = GRPOProgram(MODELS["tiny"], prompt=64, completion=192)
    assert panel.view.bars[0].nbytes == pytest.approx(estimate(program, 16, 4).peak_bytes)
    assert sorted(emulator.asked) == [(4, 4, 16, 0), (4, 4, 16, 2), (4, 8, 16, 0), (4, 8, 16, 2)]
    assert not panel.view.stale
    assert panel.found("proxy").rank == 0
    assert panel.found("proxy", hottest=False).rank == 2
    assert panel.emulated.frame["peak"].tolist() == ["6.00\N{NO-BREAK SPACE}GiB"] * 4
    assert "first 4 of 6 layers" in panel.figure.widget.layout.annotations[1].text
    assert len(panel.planner.frame) >= 2


def test_the_hot_rank_of_a_skew_is_found(emulator: Emulator) -> None:
    panel = panel_of(routing="skewed", load=200, follow=False)
    assert panel.settle()
    assert [bar.label for bar in panel.view.bars][1] == "original, rank 3 (hottest)"
    assert panel.view.bars[1].nbytes > panel.view.bars[0].nbytes
    assert emulator.asked == []
    with pytest.raises(ScaleError, match="not emulated yet"):
        panel.found()


def test_nothing_is_emulated_twice_and_only_the_latest_counts(emulator: Emulator) -> None:
    panel = panel_of()
    assert panel.settle()
    assert len(emulator.asked) == 2
    emulator.hold.set()
    panel.choose(tokens=512)
    assert panel._redraw.settle()
    assert panel.view.stale
    assert "EARLIER" in panel.figure.widget.layout.annotations[1].text
    panel.choose(tokens=256)  # known already: the one under way is given up
    assert panel.settle()
    assert not panel.view.stale
    before = len(emulator.asked)
    emulator.hold.clear()
    panel.choose(rank=0)
    assert panel.settle()
    assert len(emulator.asked) == before


def test_whole_depth_is_a_job_that_can_be_cancelled(emulator: Emulator) -> None:
    panel = panel_of()
    assert panel.settle()
    emulator.hold.set()
    panel.job.start_button.click()
    while len(emulator.asked) < 4:
        time.sleep(0.01)
    panel.job.cancel_button.click()
    assert panel.job.join(30) == "cancelled"
    assert not any(bar.emulated for bar in panel.view.bars)
    emulator.hold.clear()
    panel.job.start_button.click()
    assert panel.job.join(30) == "done"
    assert all(bar.emulated for bar in panel.view.bars)
    assert (6, 8, 16, 0) in emulator.asked
    assert "all 6 layers" in panel.figure.widget.layout.annotations[1].text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"ep": 3}, "1, 2, 4, 8, 16"),
        ({"ep": 16}, "ep = 1, 2, 4, 8"),
        ({"ep": 8}, "4 experts cannot be spread evenly over 8 ranks"),
        ({"world": 1}, "at least 2 ranks"),
        ({"rank": 16}, "0 to 15"),
        ({"n_keep": 1}, "2 or 3"),
        ({"tokens": 4096}, "shorten prompt or completion"),
        ({"routing": "skewed", "load": 900}, "0 to 4"),
        ({"routing": "skewed", "ep": 1}, "ep of at least 2"),
        ({"routing": "skewed", "load": 401}, "0 to 4"),
        ({"world": 1_000_003}, "one of 1, 1000003"),
        ({"n_keep": 9}, "7 or 8"),
        ({"n_keep": 5}, "a proxy whose experts are a multiple of 4"),
        ({"ep": 4, "rank": 17}, "0 to 15"),
        ({"ep": 0}, "over 0 ranks"),
        ({"sequences": 0}, "sequences is 0"),
        ({"tokens": 1}, "completion is 0"),
        ({"world": 6}, "one of 1, 2, 3, 6"),
    ],
)
def test_bad_input_says_what_is_possible(emulator: Emulator, wrong: dict[str, Any], words: str) -> None:
    panel = panel_of(follow=False)
    assert panel.settle()
    before = [bar.label for bar in panel.view.bars]
    panel.choose(**wrong)
    assert panel.settle()
    assert panel.status.is_error
    assert words in panel.status.text
    assert [bar.label for bar in panel.view.bars] == before, "what was shown stays"
    assert "EARLIER SETTINGS" in panel.figure.widget.layout.annotations[0].text
    assert "all of them fit" not in panel.summary.text, "that was of the settings before"
    with pytest.raises(ScaleError, match="not emulated yet"):
        panel.found()
    refusal, asked = panel.status.text, list(emulator.asked)
    panel.job.start_button.click()
    assert panel.job.join(30) == "failed"
    assert panel.status.text.endswith(refusal.partition(": ")[2]), "the same refusal, not a run of earlier settings"
    assert emulator.asked == asked
    panel.choose(**{name: getattr(panel_of(follow=False).settings, name) for name in wrong})
    assert panel.settle()
    assert not panel.status.is_error
    assert "EARLIER SETTINGS" not in panel.figure.widget.layout.annotations[0].text


def test_what_would_fit_is_listed(emulator: Emulator) -> None:
    panel = ScalePanel("DeepSeek-V3", models=MODELS, world=1024, ep=64, n_keep=64, follow=False)
    assert panel.settle()
    assert "does not fit" in panel.view.describe()
    assert "<li>recompute activations (" in panel.advice.value
    panel.choose(checkpointing=True)
    assert panel.settle()
    assert panel.view.too_large == []
    assert panel.advice.value == ""
    panel.choose(world=64)  # 16 bytes a weight, 671 billion of them, over 64 ranks
    assert panel.settle()
    assert "<li>256 ranks (" in panel.advice.value
    panel.choose(world=64, sequences=64, tokens=16384)
    assert panel.settle()
    assert "no single change of these settings is enough" in panel.advice.value


def test_another_model_offers_its_own_counts(emulator: Emulator) -> None:
    panel = panel_of(follow=False)
    panel.choose(model="DeepSeek-V3")
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    assert panel.settings.n_keep == 96
    assert panel.numbers["n_keep"].slider.options == list(range(16, 257, 8))


def test_recorded_loads_are_each_models_own(emulator: Emulator) -> None:
    assert recorded("original").n_experts == 32
    assert recorded("proxy").n_experts == 16
    panel = ScalePanel("DeepSeek-V3", models=MODELS, routing="recorded", follow=False)
    assert panel.settle()
    assert not panel.status.is_error, panel.status.text
    sources = [case.routing.source for case in panel.settings.cases()]
    assert all(("original" in source) == (place == 0) for place, source in enumerate(sources))
    own = {"original": Routing.skewed(8, 2.0, ep=4, ep_rank=2), "proxy": Routing.balanced(4)}
    mine = panel_of(routing="recorded", follow=False, own=own)
    assert mine.settle()
    assert [bar.label for bar in mine.view.bars][1] == "original, rank 2 (hottest)"


def test_where_layers_differ_the_hottest_rank_is_searched(emulator: Emulator) -> None:
    share_LE = np.repeat(np.array([[0.32, 0.165, 0.2575, 0.2575]] * 5 + [[0.04, 0.50, 0.23, 0.23]]) / 2, 2, axis=1)
    own = {"original": Routing("mine", share_LE), "proxy": Routing.balanced(4)}
    panel = panel_of(routing="recorded", own=own, rank=3)
    assert panel.settle()
    assert emulator.searched == [4], "the proxy's is certain"
    assert [bar.label for bar in panel.view.bars][:2] == ["original, rank 3", "original, rank 0 (hottest by the sum)"]
    assert [course.label for course in panel.view.courses][:2] == ["original, rank 3", "original, rank 1 (hottest)"]
    assert panel.found().rank == 1
    # The slice has the first four layers, all alike; whole depth the last one too.
    assert panel.emulated.frame["rows / mean"].tolist()[:2] == ["1.03", "0.66"]
    panel.job.start_button.click()
    assert panel.job.join(30) == "done"
    assert emulator.searched == [4, 6]
    assert [bar.label for bar in panel.view.bars][1] == "original, rank 2 (hottest)"
    assert panel.emulated.frame["rows / mean"].tolist()[:2] == [f"{(5 * 0.2575 + 0.23) * 4 / 6:.2f}"] * 2


def test_what_would_take_minutes_is_refused_in_the_panel(emulator: Emulator) -> None:
    panel = panel_of(follow=False)
    for wrong, words in (({"world": 10_000_000}, "at most 1,048,576"), ({"sequences": 10_000_000}, "at most 4,096")):
        panel.choose(**wrong)
        assert panel.settle()
        assert panel.status.is_error
        assert words in panel.status.text
        panel.choose(world=16, sequences=1)
    assert emulator.asked == []


def test_a_failed_emulation_is_shown(emulator: Emulator) -> None:
    emulator.error = ScaleError("no memory left")
    panel = panel_of()
    assert panel.settle()
    assert "no memory left" in panel.status.text
    assert panel.view.stale
    assert panel.view.bars


def test_unknown_names_are_refused() -> None:
    for wrong in ({"model": "GPT"}, {"on": "abacus"}, {"routing": "random"}):
        with pytest.raises(ScaleError, match="unknown"):
            ScalePanel(**wrong)  # type: ignore[arg-type]


def test_a_number_can_be_typed_or_slid() -> None:
    panel = panel_of(follow=False)
    world = panel.numbers["world"]
    world.box.value = 48
    assert world.value == 48
    assert 48 in world.slider.options
    world.slider.value = 32
    assert world.box.value == 32
    assert panel.settle()
