"""What programs print for people, as their code prints it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from moeproxy.traces import LogTrace, read


def _read(tmp_path: Path, text: str) -> LogTrace:
    (tmp_path / "x.log").write_text(text)
    (log,) = read(tmp_path / "x.log")
    return log


NEMO = """\
========================= Epoch 1/2 =========================

========================= Step 1/2 =========================
📊 Training Results:
  • Loss: 0.0123
  • Generation KL Error: 0.0010
  • Avg Reward: 0.2500
  • Mean Generation Length: 812.5000

⏱️  Timing:
  • Total step time: 45.20s
  • policy_training: 20.10s (44.5%)
========================= Step 2/2 =========================
📊 Validation Results:
    • Accuracy: 0.5000
    • Average response length: 801.5 tokens

📊 Training Results:
  • Loss: nan
  • Avg Reward: -0.2500
  • Critic Loss: N/A
========================= Epoch 2/2 =========================
========================= Step 1/2 =========================
📊 Training Results:
  • Loss: 5e-01
"""


def test_nemo_rl(tmp_path: Path) -> None:
    log = _read(tmp_path, "• a bullet of other text: 5\n" + NEMO)
    assert log.info.framework == "nemo-rl"
    # Its console counts the steps of each epoch from 1: the second epoch's first is step 3.
    assert log.trace.steps.index.tolist() == [1, 2, 3]
    assert np.array_equal(log.trace.values("total_loss"), [0.0123, math.nan, 0.5], equal_nan=True)
    assert log.status["total_loss"].tolist() == ["measured", "nan", "measured"]
    assert log.trace.values("reward_mean").tolist()[:2] == [0.25, -0.25]
    assert log.trace.values("seconds_per_step").tolist()[0] == 45.2
    assert log.original["timing/policy_training"].dropna().tolist() == [20.1]
    # Validation is another thing than training.
    assert log.original["validation/Average response length"].dropna().tolist() == [801.5]
    assert log.trace.values("response_length").tolist()[0] == 812.5
    assert not log.info.resumes


def _areal(step: int, loss: str, norm: str) -> str:
    return (
        f"20260101-00:00:00.123 StatsLogger INFO: Epoch 1/5 Step {step}/9 Train step {step}/45 done.\n"
        "20260101-00:00:00.123 StatsLogger INFO: Stats (1/1):\n"
        "20260101-00:00:00.123 StatsLogger INFO: \n"
        "╒═════════════════════════════════╤════════════╤═══════════════════════════╤═════════════╕\n"
        f"│ ppo_actor/update/actor_loss/avg │ {loss:>10} │ ppo_actor/task_reward/avg │ -2.5000e-01 │\n"
        "├─────────────────────────────────┼────────────┼───────────────────────────┼─────────────┤\n"
        f"│ ppo_actor/update/grad_norm      │ {norm:>10} │                           │             │\n"
        "╘═════════════════════════════════╧════════════╧═══════════════════════════╧═════════════╛\n"
    )


def test_areal(tmp_path: Path) -> None:
    log = _read(tmp_path, _areal(1, "5.0000e-01", "1.5") + "\n" + _areal(2, "2.5000e-01", "nan"))
    assert log.info.framework == "areal"
    assert log.trace.steps.index.tolist() == [1, 2]
    assert log.trace.values("policy_loss").tolist() == [0.5, 0.25]
    assert log.trace.values("reward_mean").tolist() == [-0.25, -0.25]
    assert log.status["grad_norm"].tolist() == ["measured", "nan"]
    assert log.places["line"].tolist() == [4, 13]
    assert any("from 1; the run's trackers count them from 0" in note for note in log.info.notes)


def test_a_table_that_does_not_end_hides_nothing_after_it(tmp_path: Path) -> None:
    rows = "│ ppo_actor/update/grad_norm │ 1.5 │\n" * 2500
    log = _read(tmp_path, "╒═══\n" + rows + "step:3 - actor/grad_norm:0.5 - actor/lr:1e-6\n")
    assert any("a table that does not end" in skipped.reason for skipped in log.info.skipped)
    assert 0.5 in log.original["actor/grad_norm"].tolist()


def _bar(name: str, n: int, loss: str, kl: str = "0.01") -> str:
    return (
        f"{name}:  33%|███▎      | {n}/3 [00:00<00:00, 93.41it/s, act_loss={loss}, kl={kl}, act_lr=5e-7, grad_norm=0.3]"
    )


def test_openrlhf_progress_bar(tmp_path: Path) -> None:
    bars = [
        *(_bar("Episode [1/2]", n, loss, "nan" if n == 1 else "0.01") for n, loss in [(0, "0.123"), (1, "0.123")]),
        _bar("Episode [1/2]", 1, "1.12", "nan"),
        _bar("Episode [1/2]", 2, "1.12", "nan"),
        _bar("Episode [2/2]", 0, "-2"),
    ]
    log = _read(tmp_path, "\r".join(bars) + "\n")
    assert log.info.framework == "openrlhf"
    # The bar is drawn again with the old values as it moves on; where a value changed it counts.
    assert log.trace.steps.index.tolist() == [0, 1, 3]
    assert log.trace.values("policy_loss").tolist() == [0.123, 1.12, -2]
    assert log.status["kl"].tolist() == ["measured", "nan", "measured"]
    assert log.trace.values("learning_rate").tolist() == [5e-7] * 3
    assert [skipped.count for skipped in log.info.skipped] == [1]
    assert any("3 significant digits" in note for note in log.info.notes)


def test_bars_of_micro_batches_are_numbered_only_where_no_step_is_named(tmp_path: Path) -> None:
    bars = "".join(_bar("Train epoch [1/1]", n, f"0.{n + 1}") + "\n" for n in range(3))
    log = _read(tmp_path, bars)
    assert (log.info.clock, log.trace.steps.index.tolist()) == ("row", [1, 2, 3])
    step = "Global step 7: {'policy_loss': 0.5, 'actor_lr': 5e-07, 'actor_grad_norm': 0.25}\n"
    log = _read(tmp_path, bars + step)
    assert log.trace.steps.index.tolist() == [7]
    assert log.trace.values("grad_norm").tolist() == [0.25]


def test_bars_without_numbers_are_bars(tmp_path: Path) -> None:
    log = _read(tmp_path, "Loading: 50%|#####     | 1/2 [00:01<00:01, 1.0s/it, file=a.bin]\n")
    assert not log.has_metrics
    assert log.info.progress is not None
    assert log.info.progress.text == "1/2"
