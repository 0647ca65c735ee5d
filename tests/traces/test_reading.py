"""traces.read: whole logs to traces, with the traps that real logs hold."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, RunInfo, Trace, overlay_notes, read
from tests.traces.logs.make import event, events


def _read(tmp_path: Path, text: str, name: str = "x.log", **options) -> LogTrace:
    (tmp_path / name).write_text(text)
    (log,) = read(tmp_path / name, **options)
    return log


def _jsonl(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_verl_console(tmp_path: Path) -> None:
    text = "".join(
        f"(TaskRunner pid=9) step:{n} - actor/grad_norm:{n}.5 - actor/lr(1e-4):0.01 - critic/score/mean:0.25 - "
        f"training/rollout_probs_diff_mean:0.003 - response_length/mean:100.0\n"
        for n in (1, 2, 3)
    )
    log = _read(tmp_path, text)
    assert log.info.framework == "verl"
    assert log.trace.steps.index.tolist() == [1, 2, 3]
    assert log.trace.values("grad_norm").tolist() == [1.5, 2.5, 3.5]
    assert log.trace.values("learning_rate").tolist() == [1e-6] * 3
    assert log.trace.values("prob_diff_mean").tolist() == [0.003] * 3
    assert "logprob_diff_mean" not in log.trace.signals
    assert log.info.keys["learning_rate"] == "actor/lr(1e-4)"
    assert log.original["actor/lr(1e-4)"].tolist() == [0.01] * 3
    assert log.trace.provenance.source == "file"
    assert log.places["line"].tolist() == [1, 2, 3]
    assert set(log.places["process"]) == {"TaskRunner pid=9"}


def test_hidden_nan_of_transformers(tmp_path: Path) -> None:
    history = [
        {"step": 1, "loss": 0.5, "grad_norm": 1.0, "epoch": 0.1},
        {"step": 2, "loss": 0.0, "grad_norm": math.nan, "epoch": 0.2},
        {"step": 3, "loss": 0.0, "grad_norm": 0.0, "epoch": 0.3},
        {"step": 3, "train_runtime": 5.0, "epoch": 0.3},
    ]
    log = _read(tmp_path, json.dumps({"log_history": history}), "trainer_state.json")
    assert log.info.framework == "transformers"
    assert log.status["total_loss"].tolist() == ["measured", "filtered", "measured"]
    assert log.status["grad_norm"].tolist() == ["measured", "nan", "measured"]
    assert log.trace.missing("total_loss").tolist() == [False, True, False]
    assert log.trace.missing("grad_norm").tolist() == [False, False, False]
    assert np.isnan(log.trace.values("grad_norm")).tolist() == [False, True, False]
    assert log.original["loss"].tolist()[:3] == [0.5, 0.0, 0.0]
    assert any("1 losses of 0" in note for note in log.info.notes)


def test_a_loss_that_may_leave_out_steps_is_said(tmp_path: Path) -> None:
    # Over several steps the Trainer takes the mean of the finite losses only: nothing is 0 then.
    history = [{"step": n, "loss": 0.5, "grad_norm": norm, "epoch": 0.1} for n, norm in [(10, math.nan), (20, 1.0)]]
    log = _read(tmp_path, json.dumps({"log_history": [*history, {"step": 20, "train_runtime": 1.0}]}), "state.json")
    assert log.status["total_loss"].tolist() == ["measured", "measured"]
    assert any("1 losses beside a gradient norm that is not finite may be means" in note for note in log.info.notes)


def test_console_without_steps_is_numbered_and_says_so(tmp_path: Path) -> None:
    text = "{'loss': '2.5', 'grad_norm': '1', 'learning_rate': '5e-05', 'epoch': '0.5'}\n" * 2
    text = text + "{'train_runtime': '1', 'epoch': '1'}\n"
    log = _read(tmp_path, text.replace("0.5'", "0.25'", 1))
    assert log.info.clock == "row"
    assert log.trace.steps.index.tolist() == [1, 2]
    assert log.status["total_loss"].tolist() == ["number text"] * 2
    assert any("numbered from 1" in note for note in log.info.notes)
    assert log.places["step"].tolist() == [1, 2, -1]


def test_trl_over_transformers(tmp_path: Path) -> None:
    row = {
        "loss": 0.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-6,
        "reward": 0.75,
        "reward_std": 0.25,
        "frac_reward_zero_std": 0.5,
        "completions/mean_length": 20.0,
        "completions/clipped_ratio": 0.125,
        "sampling/sampling_logp_difference/mean": 0.01,
        "sampling/sampling_logp_difference/max": 0.5,
        "epoch": 0.1,
    }
    log = _read(tmp_path, json.dumps({"log_history": [{**row, "step": 4}]}))
    assert log.info.framework == "trl"
    found = {name: float(log.trace.values(name)[0]) for name in log.trace.signals}
    assert found == {
        "total_loss": 0.0,
        "grad_norm": 0.5,
        "learning_rate": 1e-6,
        "reward_mean": 0.75,
        "reward_std": 0.25,
        "zero_variance_groups": 0.5,
        "response_length": 20.0,
        "truncated": 0.125,
        "logprob_diff_mean": 0.01,
        "logprob_diff_max": 0.5,
    }


def test_swift_step_of_steps(tmp_path: Path) -> None:
    rows = [
        {"loss": 1.5, "grad_norm": 1.0, "memory(GiB)": 3, "train_speed(iter/s)": 1, "global_step/max_steps": f"{n}/9"}
        for n in (5, 6)
    ]
    log = _read(tmp_path, _jsonl(*rows, {"train_dataset": "x", "model_parameter_info": "y"}), "logging.jsonl")
    assert log.info.framework == "ms-swift"
    assert log.trace.steps.index.tolist() == [5, 6]
    assert log.original["global_step/max_steps"].tolist() == ["5/9", "6/9", None]
    assert any("1 rows have no step" in note for note in log.info.notes)


def test_llama_factory(tmp_path: Path) -> None:
    row = {"current_steps": 3, "total_steps": 9, "loss": 0.5, "lr": 1e-5, "percentage": 33, "elapsed_time": "0:01:03"}
    log = _read(tmp_path, _jsonl(row), "trainer_log.jsonl")
    assert log.info.framework == "llama-factory"
    assert log.trace.values("learning_rate").tolist() == [1e-5]
    assert log.original["elapsed_time"].tolist() == ["0:01:03"]
    assert log.original_status["elapsed_time"].tolist() == ["text"]


def test_openrlhf(tmp_path: Path) -> None:
    text = (
        "Global step 4: {'policy_loss': 0.5, 'actor_lr': 1e-6, 'reward': 1.0, 'actor_grad_norm': 2.0, 'vllm_kl': 0.1}\n"
    )
    log = _read(tmp_path, text)
    assert log.info.framework == "openrlhf"
    assert log.trace.steps.index.tolist() == [4]
    assert {n: float(log.trace.values(n)[0]) for n in ("policy_loss", "grad_norm", "logprob_diff_k1")} == {
        "policy_loss": 0.5,
        "grad_norm": 2.0,
        "logprob_diff_k1": 0.1,
    }


def test_megatron_units(tmp_path: Path) -> None:
    line = " iteration  {}/ 9 | elapsed time per iteration (ms): 250.0 | lm loss: 7.5 | grad norm: {} |\n"
    log = _read(tmp_path, line.format(1, 0.5) + line.format(2, "nan"))
    assert log.info.framework == "megatron-lm"
    assert log.trace.values("seconds_per_step").tolist() == [0.25, 0.25]
    assert log.status["grad_norm"].tolist() == ["measured", "nan"]
    assert log.info.clock == "iteration"


def test_slime_clocks_that_tick_alike_are_joined_and_others_not(tmp_path: Path) -> None:
    rollout = "rollout {0}: {{'rollout/raw_reward': 0.{0}, 'rollout/step': {0}}}\n"
    train = "step {0}: {{'train/loss': 1.{0}, 'train/grad_norm': 1.0, 'train/step': {0}}}\n"
    log = _read(tmp_path, "".join(rollout.format(n) + train.format(n) for n in range(3)))
    assert log.info.framework == "slime"
    assert log.trace.steps.index.tolist() == [0, 1, 2]
    assert log.trace.values("total_loss").tolist() == [1.0, 1.1, 1.2]
    assert log.trace.values("reward_mean").tolist() == [0.0, 0.1, 0.2]
    text = "".join(rollout.format(n) + train.format(2 * n) + train.format(2 * n + 1) for n in range(3))
    (tmp_path / "y.log").write_text(text)
    by_clock = {log.info.clock: log for log in read(tmp_path / "y.log")}
    assert by_clock["train/step"].trace.steps.index.tolist() == [0, 1, 2, 3, 4, 5]
    assert by_clock["rollout/step"].trace.steps.index.tolist() == [0, 1, 2]
    assert by_clock["rollout/step"].trace.signals == ("reward_mean",)


def test_resume_keeps_both_and_shows_the_later(tmp_path: Path) -> None:
    rows = [{"step": n, "actor/grad_norm": float(n), "actor/lr": 1e-6} for n in (1, 2, 3, 4, 5)]
    again = [{"step": n, "actor/grad_norm": 10.0 + n, "actor/lr": 1e-6} for n in (3, 4)]
    log = _read(tmp_path, _jsonl(*rows, *again))
    # Step 5 belongs to a past that was given up at the resume.
    assert log.trace.steps.index.tolist() == [1, 2, 3, 4]
    assert log.trace.values("grad_norm").tolist() == [1, 2, 13, 14]
    assert log.original["actor/grad_norm"].tolist() == [1, 2, 3, 4, 5, 13, 14]
    assert log.places["attempt"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert log.places["shown"].tolist() == [True, True, False, False, False, True, True]
    assert [(r.step, r.before, r.line) for r in log.info.resumes] == [(3, 5, 6)]
    assert "resumed at step 3" in log.summary()


def test_a_return_to_the_first_step_is_another_run(tmp_path: Path) -> None:
    rows = [{"step": n, "actor/grad_norm": float(n)} for n in (1, 2, 1, 2, 3)]
    (tmp_path / "x.jsonl").write_text(_jsonl(*rows))
    first, second = read(tmp_path / "x.jsonl")
    assert (first.info.name, second.info.name) == ("x [run 1]", "x [run 2]")
    assert (len(first.trace.steps), len(second.trace.steps)) == (2, 3)
    assert second.places["line"].tolist() == [3, 4, 5]


def test_rows_of_one_step_on_several_lines(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "optim/grad_norm": 0.5, "optim/lr": 1e-6},
        {"step": 1, "loss/mean": 0.25},
        {"step": 2, "optim/grad_norm": 0.75, "optim/lr": 1e-6},
        {"step": 2, "loss/mean": 0.125},
        {"step": 1, "max_vio/mean": 6.0},
    ]
    log = _read(tmp_path, _jsonl(*rows))
    assert log.info.framework == "prime-rl"
    assert log.trace.values("policy_loss").tolist() == [0.25, 0.125]
    assert log.trace.values("grad_norm").tolist() == [0.5, 0.75]
    assert log.status["expert_load_violation"].tolist() == ["measured", "missing"]
    assert not log.info.resumes
    assert any("1 rows came after later steps" in note for note in log.info.notes)


def test_a_line_printed_twice_and_two_values_of_a_step(tmp_path: Path) -> None:
    same = {"step": 1, "actor/grad_norm": 0.5}
    log = _read(tmp_path, _jsonl(same, same, {"step": 2, "actor/grad_norm": 1.0}))
    assert not any("two values" in note for note in log.info.notes)
    log = _read(tmp_path, _jsonl(same, {"step": 2, "actor/grad_norm": 1.0}, {"step": 2, "actor/grad_norm": 2.0}))
    assert log.trace.values("grad_norm").tolist() == [0.5, 2.0]
    assert any("1 steps have two values of a signal (2)" in note for note in log.info.notes)


def test_processes_side_by_side_are_runs_of_their_own(tmp_path: Path) -> None:
    text = "".join(
        f"[rank{rank}]: step:{n} - actor/grad_norm:{rank}.{n} - actor/lr:1e-6\n" for n in (1, 2) for rank in (0, 1)
    )
    (tmp_path / "x.log").write_text(text)
    logs = read(tmp_path / "x.log")
    assert [log.info.name for log in logs] == ["x [rank0]", "x [rank1]"]
    assert [log.trace.values("grad_norm").tolist() for log in logs] == [[0.1, 0.2], [1.1, 1.2]]


def test_processes_that_log_different_signals_are_one_run(tmp_path: Path) -> None:
    text = "".join(f"[rank0]: step:{n} - actor/lr:1e-6\n[rank1]: step:{n} - actor/grad_norm:0.5\n" for n in (1, 2))
    log = _read(tmp_path, text)
    assert log.trace.signals == ("grad_norm", "learning_rate")
    assert log.places["process"].tolist() == ["rank0", "rank1"] * 2


def test_a_new_process_after_a_resume_is_the_same_run(tmp_path: Path) -> None:
    lines = [(7, 1), (7, 2), (7, 3), (8, 2), (8, 3)]
    text = "".join(f"(TaskRunner pid={pid}) step:{n} - actor/grad_norm:{pid}.{n}\n" for pid, n in lines)
    log = _read(tmp_path, text)
    assert log.trace.values("grad_norm").tolist() == [7.1, 8.2, 8.3]
    assert len(log.info.resumes) == 1


def test_null_nan_and_sentinel_are_told_apart(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "train/loss": 1.0, "train/gen_kl_error": None, "train/probs_ratio_max": 2.0},
        {"step": 2, "train/loss": 1.0, "train/gen_kl_error": math.nan, "train/probs_ratio_max": -1.0},
        {"step": 3, "train/loss": 1.0, "train/gen_kl_error": 0.5},
    ]
    log = _read(tmp_path, _jsonl(*rows))
    assert log.info.framework == "nemo-rl"
    assert log.status["logprob_diff_k3"].tolist() == ["null", "nan", "measured"]
    assert log.trace.missing("logprob_diff_k3").tolist() == [True, False, False]
    assert log.status["is_ratio_max"].tolist() == ["measured", "nonfinite", "missing"]
    assert np.isnan(log.trace.values("is_ratio_max")).tolist() == [False, True, True]
    assert log.trace.missing("is_ratio_max").tolist() == [False, False, True]
    assert log.original["train/probs_ratio_max"].tolist()[1] == -1.0


def test_version_of_the_framework(tmp_path: Path) -> None:
    log = _read(tmp_path, "verl==0.7.1\ntorch==2.9.0\nstep:1 - actor/grad_norm:0.5 - actor/lr:1e-6\n")
    assert log.info.version == "0.7.1"
    assert log.trace.provenance.versions == {"verl": "0.7.1", "torch": "2.9.0"}
    assert "verl 0.7.1" in log.summary()


def test_a_log_without_metrics_says_what_it_holds(tmp_path: Path) -> None:
    text = "  0%| | 0/58 [00:00<?]\nTraceback (most recent call last):\n  File x\nKeyError: 'reward'\n"
    log = _read(tmp_path, text)
    assert not log.has_metrics
    with pytest.raises(TraceError, match=r"no metric in this log.*0/58.*KeyError: 'reward'"):
        log.trace  # noqa: B018 - reading it raises
    assert "KeyError" in repr(log)
    assert "no metric" in log.summary()
    log = _read(tmp_path, "hello\n")
    assert "nothing that reads as a metric" in log.contents
    assert "hello" not in log.summary()


def test_mapping_step_and_framework_of_the_caller(tmp_path: Path) -> None:
    text = "it,my_loss,my_norm\n10,0.5,1\n20,0.25,2\n"
    log = _read(tmp_path, text, "x.csv")
    assert not log.has_metrics
    log = _read(tmp_path, text, "x.csv", mapping={"my_loss": "policy_loss", "nope": "kl"}, step="it")
    assert log.trace.steps.index.tolist() == [10, 20]
    assert log.trace.values("policy_loss").tolist() == [0.5, 0.25]
    assert any("the mapping names nope" in note for note in log.info.notes)
    with pytest.raises(TraceError, match="policy_loss"):
        read(tmp_path / "x.csv", mapping={"my_loss": "polcy_loss"})
    with pytest.raises(TraceError, match="unknown framework"):
        read(tmp_path / "x.csv", framework="nope")
    log = _read(tmp_path, _jsonl({"step": 1, "loss": 0.5}), framework="megatron-lm")
    assert log.trace.signals == ("lm_loss",)


def test_unknown_programs_are_taken_at_their_word_with_a_warning(tmp_path: Path) -> None:
    log = _read(tmp_path, "step,loss\n1,0.5\n2,nan\n", "x.csv")
    assert log.info.framework == "unknown"
    assert log.status["total_loss"].tolist() == ["measured", "nan"]
    assert any("framework is not known" in note for note in log.info.notes)


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1.a").write_bytes(events(event(1, {"actor/grad_norm": 0.5})))
    (tmp_path / "tb" / "events.out.tfevents.2.a").write_bytes(events(event(2, {"actor/grad_norm": 0.25})))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(_jsonl({"step": 1, "actor/lr": 1e-6}).encode()))
    (tmp_path / "notes.txt").write_text("nothing\n")
    (tmp_path / "config.json").write_text('{"a": [1, 2]}')
    (tmp_path / "broken.json").write_text('{"log_history": [\n')
    (tmp_path / "tb2").mkdir()
    (tmp_path / "tb2" / "events.out.tfevents.1").write_bytes(events())
    (tmp_path / "weights.bin").write_bytes(b"\0" * 99)
    (tmp_path / ".hidden.log").write_text("step:1 - actor/lr:1\n")
    logs = {log.info.name: log for log in read(tmp_path)}
    assert set(logs) == {"tb", "b", "broken", "events.out.tfevents.1"}
    assert not logs["events.out.tfevents.1"].has_metrics
    assert "unreadable" in logs["broken"].contents
    assert "no JSON" in logs["broken"].contents
    assert logs["tb"].trace.values("grad_norm").tolist() == [0.5, 0.25]
    assert logs["tb"].places["file"].astype(str).str[-3:].tolist() == ["1.a", "2.a"]
    assert logs["b"].info.files == (str(tmp_path / "b.jsonl.gz"),)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"SQLite format 3\0", "broken database"),
        (b":SWL\xd6\xe1\x09", "SwanLab in version 9"),
        (b"\0\1\2" * 50, "binary data"),
        (b"PAR1", "Parquet"),
    ],
)
def test_other_files_are_named(tmp_path: Path, data: bytes, error: str) -> None:
    (tmp_path / "x.log").write_bytes(data)
    with pytest.raises(TraceError, match=error):
        read(tmp_path / "x.log")
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="no log in it"):
        read(tmp_path / "empty")


def test_definitions_that_differ_are_said(tmp_path: Path) -> None:
    verl = _read(tmp_path, "step:1 - actor/entropy:0.5 - actor/pg_loss:0.1 - actor/grad_norm:1.0\n")
    lab = Trace(
        verl.trace.steps[["entropy", "policy_loss"]], None, RunInfo(model="m", method="original", n_experts=8, seed=0)
    )
    (note,) = overlay_notes(verl, lab)
    assert note.startswith("policy_loss: verl, mean over the update's micro-batches; the other: as moeproxy defines it")
    assert overlay_notes(verl, verl) == ()


def test_traces_of_logs_can_be_saved(tmp_path: Path) -> None:
    log = _read(
        tmp_path, _jsonl({"step": 1, "actor/lr": None, "actor/grad_norm": math.nan}, {"step": 2, "actor/lr": 0.5})
    )
    back = Trace.load(log.trace.save(tmp_path / "x.parquet"))
    assert back.equals(log.trace)
    assert back.provenance.config["log"]["framework"] == "verl"
    assert log.trace.missing("learning_rate").tolist() == [True, False]


def test_steps_that_are_none(tmp_path: Path) -> None:
    rows = [{"step": step, "actor/lr": 0.5} for step in (1.5, -1, "x", 10**30, None, 3.0)]
    log = _read(tmp_path, _jsonl(*rows))
    assert log.trace.steps.index.tolist() == [3]
    assert log.places["step"].tolist() == [-1] * 5 + [3]
