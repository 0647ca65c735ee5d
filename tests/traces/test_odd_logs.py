"""Logs as programs really leave them: torn, glued, wrapped, prefixed, labelled. No number is lost or wrong unsaid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeproxy.errors import TraceError
from moeproxy.traces import LogTrace, overlay_notes, read


def _logs(tmp_path: Path, text: str, name: str = "x.log", **options) -> tuple[LogTrace, ...]:
    (tmp_path / name).write_text(text)
    return read(tmp_path / name, **options)


def _values(log: LogTrace, signal: str) -> dict[int, float]:
    return dict(zip(log.trace.steps.index.tolist(), log.trace.values(signal).tolist(), strict=True))


def _said(log: LogTrace) -> str:
    return " | ".join([*log.info.notes, *map(str, log.info.skipped), *map(str, log.info.findings)])


@pytest.mark.parametrize("prefix", ["", "\x1b[36m(skyrl_entrypoint pid=4123)\x1b[0m "])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_dict_on_the_line_after_its_step(tmp_path: Path, prefix: str, wrapped: bool) -> None:
    text = ""
    for step in (1, 2, 7):
        cells = [f"'policy/final_loss': '0.{step}000'", "'policy/grad_norm': '1.5'", "'trainer/epoch': 0"]
        text += f"{prefix}2025-09-01 10:00:01.000 | INFO | skyrl_train.utils.tracking:log:93 - Step {step}: \n"
        joint = f",\n{prefix} " if wrapped else ", "
        text += f"{prefix}{{{joint.join(cells)}}}\n"
    (log,) = _logs(tmp_path, text)
    assert log.info.framework == "skyrl"
    assert _values(log, "total_loss") == {1: 0.1, 2: 0.2, 7: 0.7}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", "step,loss,reward\n1,0.5,\n1,,0.9\n2,0.4,\n2,,0.8\n"),
        ("x.jsonl", '{"step":1,"loss":0.5}\n{"step":1,"loss":null,"reward":0.9}\n{"step":2,"loss":0.4,"reward":0.8}\n'),
    ],
)
def test_an_empty_cell_of_a_later_row_takes_no_value_away(tmp_path: Path, name: str, text: str) -> None:
    (log,) = _logs(tmp_path, text, name)
    assert _values(log, "total_loss") == {1: 0.5, 2: 0.4}
    assert _values(log, "reward_mean") == {1: 0.9, 2: 0.8}
    assert "two values" not in _said(log)


@pytest.mark.parametrize("labels", [("[rank0]: ", "[rank1]: "), ("[default0]:", "[default1]:"), ("0: ", "1: ")])
@pytest.mark.parametrize("stepped", [True, False])
def test_ranks_side_by_side_are_runs_of_their_own(tmp_path: Path, labels: tuple[str, str], stepped: bool) -> None:
    text = ""
    for row in range(4):
        for rank, label in enumerate(labels):
            step = f"'step': {row + 1}, " if stepped else ""
            text += (
                f"{label}{{{step}'loss': {rank + row / 10}, 'grad_norm': 1.0, 'learning_rate': 1e-6, 'epoch': 0.1}}\n"
            )
    logs = _logs(tmp_path, text)
    assert [_values(log, "total_loss") for log in logs] == [{n + 1: r + n / 10 for n in range(4)} for r in range(2)]


def test_a_process_that_takes_over_goes_on_with_the_numbers(tmp_path: Path) -> None:
    text = "".join(f"(A pid={1 + n // 3}) {{'loss': {n}.5, 'epoch': {n}, 'learning_rate': 1}}\n" for n in range(6))
    (log,) = _logs(tmp_path, text)
    assert _values(log, "total_loss") == {n + 1: n + 0.5 for n in range(6)}


CUT = {
    "verl.log": "step:1 - actor/grad_norm:1.5\nstep:2 - actor/grad_norm:12",
    "megatron.log": " iteration 1/ 9 | grad norm: 1.5 |\n iteration 2/ 9 | lm loss: 1.5E+0",
    "prime.log": "Step 1 | Loss: 0.5 | Mismatch KL: 0.1\nStep 2 | Loss: 0.2",
    "table.csv": "step,loss\n1,0.5\n2,0.4",
}


@pytest.mark.parametrize("name", CUT)
def test_a_last_line_without_end_may_be_cut_and_that_is_said(tmp_path: Path, name: str) -> None:
    (log,) = _logs(tmp_path, CUT[name], name)
    assert "may be cut short" in _said(log)
    (whole,) = _logs(tmp_path, CUT[name] + (" |\n" if name == "megatron.log" else "\n"), name)
    assert "cut short" not in _said(whole)
    assert len(whole.trace.steps) == len(log.trace.steps) == 2


@pytest.mark.parametrize("between", ["", " ", "(TaskRunner pid=1) "])
def test_records_of_verl_on_one_line_keep_their_numbers(tmp_path: Path, between: str) -> None:
    first = "step:4 - actor/pg_loss:0.8 - actor/grad_norm:1.5"
    (log,) = _logs(tmp_path, f"(TaskRunner pid=1) {first}{between}step:5 - actor/pg_loss:0.9 - actor/grad_norm:2.5\n")
    assert _values(log, "policy_loss") == {4: 0.8, 5: 0.9}
    assert _values(log, "grad_norm") == {4: 1.5, 5: 2.5}


def test_a_step_within_a_key_does_not_part_a_line(tmp_path: Path) -> None:
    (log,) = _logs(
        tmp_path, "step:4 - training/global_step:7 - actor/pg_loss:0.8 - val/a/step:5 - actor/grad_norm:1.5\n"
    )
    assert _values(log, "grad_norm") == {4: 1.5}


def test_a_line_that_pprint_wraps(tmp_path: Path) -> None:
    text = (
        '(T pid=1) ("step:1 - actor/pg_loss:np.float64(0.5) - "\n'
        "(T pid=1)  'critic/score/mean:np.float64(0.25) - response_length/mean:10.0')\n"
        "(T pid=1) step:2 - actor/pg_loss:0.6 - critic/score/mean:0.35\n"
    )
    (log,) = _logs(tmp_path, text)
    assert _values(log, "policy_loss") == {1: 0.5, 2: 0.6}
    assert _values(log, "reward_mean") == {1: 0.25, 2: 0.35}
    assert log.counts("response_length") == {"measured": 1, "missing": 1}


@pytest.mark.parametrize("tail", ["/usr/lib/x.py:12: UserWarning: foo", " WARNING:root:x"])
def test_text_after_a_number_does_not_hide_it(tmp_path: Path, tail: str) -> None:
    (log,) = _logs(tmp_path, f"step:1 - actor/pg_loss:0.5 - actor/grad_norm:1.25{tail}\n")
    assert _values(log, "grad_norm") == {1: 1.25}
    assert "something else that follows a number" in _said(log)


def test_keys_with_colons_stay_whole(tmp_path: Path) -> None:
    (log,) = _logs(tmp_path, "step:1 - val-core/math:500/acc/mean@8:0.5 - actor/grad_norm:1.25\n")
    assert log.original["val-core/math:500/acc/mean@8"].tolist() == [0.5]


@pytest.mark.parametrize("prefix", ["2025-01-01 INFO ", "  ", "(Worker pid=7) "])
def test_nested_objects_behind_a_prefix_are_rows(tmp_path: Path, prefix: str) -> None:
    rows = [{"step": n, "loss": n / 10, "rewards": {"acc": n / 20}} for n in (1, 2)]
    (log,) = _logs(tmp_path, "".join(f"{prefix}{json.dumps(row)}\n" for row in rows))
    assert _values(log, "total_loss") == {1: 0.1, 2: 0.2}
    assert log.original["rewards/acc"].tolist() == [0.05, 0.1]


def test_a_configuration_is_no_row(tmp_path: Path) -> None:
    (log,) = _logs(
        tmp_path, "config: {'model': {'name': 'x', 'layers': 3}, 'lr': 1e-6}\nstep:1 - actor/grad_norm:1.5\n"
    )
    assert len(log.original) == 1


@pytest.mark.parametrize("torn", ["Step 1: {'loss': 0.5, 'grad_norm'\n", '{"step":2,"note":"it\'s{"a":\n'])
def test_a_torn_line_costs_itself_only(tmp_path: Path, torn: str) -> None:
    rows = "".join(f'{{"step":{n},"loss":{n}.5,"r":{{"a":1}}}}\n' for n in range(3, 600))
    (log,) = _logs(tmp_path, torn + rows)
    assert _values(log, "total_loss") == {n: n + 0.5 for n in range(3, 600)}
    assert [skipped.lines for skipped in log.info.skipped] == [[1]]
    python = "".join(f"{{'step': {n}, 'loss': {n}.5, 'learning_rate': 1, 'epoch': 0}}\n" for n in range(3, 600))
    (log,) = _logs(tmp_path, torn + python)
    assert _values(log, "total_loss") == {n: n + 0.5 for n in range(3, 600)}


def test_slimes_performance_lines_belong_to_rollouts(tmp_path: Path) -> None:
    text = ""
    for n in range(3):
        text += f"(R pid=5) perf {n}: {{'rollout/response_len/mean': {100 + n}.5, 'rollout/truncated_ratio': 0.1}}\n"
        text += f"(T pid=7) rollout {n}: {{'rollout/raw_reward': 0.{n}, 'rollout/response_lengths': 90.5}}\n"
        text += f"(T pid=7) step {n}: {{'train/loss': 0.{n}, 'train/grad_norm': 0.5, 'train/step': {n}}}\n"
        text += f"(T pid=7) perf {n}: {{'perf/step_time': {30 + n}.0}}\n"
    (log,) = _logs(tmp_path, text)
    assert log.info.framework == "slime"
    assert _values(log, "response_length") == {0: 100.5, 1: 101.5, 2: 102.5}
    assert _values(log, "seconds_per_step") == {0: 30.0, 1: 31.0, 2: 32.0}
    assert _values(log, "truncated") == {0: 0.1, 1: 0.1, 2: 0.1}


def test_a_key_without_steps_gives_way_to_one_that_has_them(tmp_path: Path) -> None:
    rows = [{"rollout/response_len/mean": 9.5}, {"rollout/step": 1, "rollout/response_lengths": 90.5, "train/ois": 1}]
    (log,) = _logs(tmp_path, "".join(json.dumps(row) + "\n" for row in rows), "x.jsonl")
    assert _values(log, "response_length") == {1: 90.5}
    assert log.info.keys["response_length"] == "rollout/response_lengths"


ROWS = "".join(f"{{'loss': 0.{n}, 'grad_norm': 1.0, 'learning_rate': 1e-6, 'epoch': 0.{n}}}\n" for n in range(1, 5))


@pytest.mark.parametrize("text", [json.dumps({"model": "x", "lr": 1e-6}, indent=2) + "\n" + ROWS, "[" + ROWS])
def test_a_console_may_begin_like_json(tmp_path: Path, text: str) -> None:
    (log,) = _logs(tmp_path, text)
    assert list(_values(log, "total_loss").values()) == [0.1, 0.2, 0.3, 0.4]


def test_objects_over_several_lines_are_rows(tmp_path: Path) -> None:
    rows = [{"step": n, "loss": n / 10} for n in range(1, 4)]
    (log,) = _logs(tmp_path, "\n".join(json.dumps(row, indent=2) for row in rows), "x.json")
    assert _values(log, "total_loss") == {1: 0.1, 2: 0.2, 3: 0.3}


@pytest.mark.parametrize("joint", ["", " ", ", "])
def test_objects_that_stand_on_one_line_are_rows(tmp_path: Path, joint: str) -> None:
    text = joint.join(f'{{"step": {n}, "loss": 0.{n}}}' for n in (1, 2, 3))
    (log,) = _logs(tmp_path, f'{{"step": 0, "loss": 0.5}},\n{text}\n', "x.jsonl")
    assert _values(log, "total_loss") == {0: 0.5, 1: 0.1, 2: 0.2, 3: 0.3}


def test_endless_returns_to_the_first_step_are_refused(tmp_path: Path) -> None:
    text = "".join(f'{{"step": {n % 2}, "loss": 0.5}}\n' for n in range(100_000))
    with pytest.raises(TraceError, match="returns to the first step"):
        _logs(tmp_path, text, "x.jsonl")


def test_a_resume_placed_by_rounded_epochs_says_how_sure_it_is(tmp_path: Path) -> None:
    def row(n: int) -> str:
        return f"{{'loss': {n}.5, 'grad_norm': 1.0, 'learning_rate': 1e-6, 'epoch': {n // 3 / 100}}}\n"

    (log,) = _logs(tmp_path, "".join(map(row, [*range(20), *range(10, 15)])))
    assert "may be 2 off" in _said(log)
    (sure,) = _logs(tmp_path, "".join(map(row, range(20))))
    assert "off" not in _said(sure)


def test_steps_that_are_none_are_named(tmp_path: Path) -> None:
    (log,) = _logs(tmp_path, '{"step": 0.5, "loss": 1}\n{"step": 1.5, "loss": 2}\n', "x.jsonl")
    assert "'step' gives no row with a metric" in _said(log)


def test_what_a_mapping_cannot_do_is_said(tmp_path: Path) -> None:
    text = "it,a,b,c\n1,0.5,0.25,x\n2,0.5,0.25,y\n"
    mapping = {"a": "policy_loss", "b": "policy_loss", "c": "grad_norm"}
    (log,) = _logs(tmp_path, text, "x.csv", mapping=mapping, step="it")
    assert "c, which holds no number" in _said(log)
    assert "policy_loss several keys (a, b)" in _said(log)
    assert _values(log, "policy_loss") == {1: 0.5, 2: 0.5}


def test_overlays_say_that_steps_or_meanings_differ(tmp_path: Path) -> None:
    (numbered,) = _logs(tmp_path, ROWS, "a.log")
    (stepped,) = _logs(
        tmp_path, "".join(f'{{"step": {n}, "loss": 1, "epoch": 1, "learning_rate": 1}}\n' for n in (1, 2))
    )
    assert any("rows of the log" in note for note in overlay_notes(numbered, stepped))
    assert any("rows of the log" in note for note in overlay_notes(numbered.trace, stepped.trace))
    assert overlay_notes(stepped, stepped) == ()
    (mine,) = _logs(tmp_path, "step,loss\n1,0.5\n", "b.csv")
    (theirs,) = _logs(tmp_path, "step,grad_norm\n1,0.5\n", "c.csv", mapping={"grad_norm": "total_loss"}, step="step")
    for left, right in ((mine, mine), (mine, theirs), (theirs, theirs)):
        assert any(note.startswith("total_loss") for note in overlay_notes(left, right))


def test_a_pattern_of_keys_counts_where_one_fits(tmp_path: Path) -> None:
    row = {"step": 1, "optim/grad_norm": 1.0, "loss/mean": 0.5, "train/math/agent/reward/mean": 0.25}
    (log,) = _logs(tmp_path, json.dumps(row), "x.jsonl", framework="prime-rl")
    assert _values(log, "reward_mean") == {1: 0.25}
    (log,) = _logs(tmp_path, json.dumps(row | {"train/code/reward/mean": 0.75}), "x.jsonl", framework="prime-rl")
    assert "reward_mean" not in log.trace.signals
    assert "train/code/reward/mean" in log.unmapped


FORMATS = {
    "slime": "(T pid=7) model.py:500 - step {n}: {{'train/loss': {n}.5, 'train/grad_norm': 0.5, 'train/step': {n}}}\n",
    "openrlhf": "(T pid=7) Global step {n}: {{'policy_loss': {n}.5, 'actor_lr': 1e-6, 'reward': 0.5}}\n",
    "roll": '[2025-09-01 INFO] metrics_tag: {{"step": {n}, "metrics": {{"actor/total_loss": {n}.5, "time/a": 1.0}}}}\n',
    "trl": "[INFO] log: {{'loss': {n}.5, 'grad_norm': 1.0, 'learning_rate': 1, 'reward_std': 0, 'epoch': {n}.0}}\n",
    "skyrl": "(s pid=4) INFO - Step {n}: \n(s pid=4) {{'policy/final_loss': '{n}.5', 'policy/grad_norm': '1.5'}}\n",
    "verl": "(T pid=1) step:{n} - actor/pg_loss:{n}.5 - actor/grad_norm:1.5\n",
    "megatron": " [2025-10-01 12:00:00] iteration {n}/ 90 | lm loss: {n}.5 | grad norm: 0.5 |\n",
    "prime": "12:00:00 SUCCESS Step {n} | 1.20s | Loss {n}.5 | Mismatch KL 0.0150 |\n",
}
SAMPLES = [
    'First rollout sample: <tool_call>{"name": "calc", "arguments": {"x\n',
    "response: {'answer': [4, {'why': 'sum\n",
    "config: {'model': {'a': {'b': 1,\n",
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("sample", SAMPLES)
def test_an_open_brace_in_a_text_swallows_no_metrics(tmp_path: Path, form: str, sample: str) -> None:
    lines = [FORMATS[form].format(n=n) for n in range(1, 41)]
    (clean,) = _logs(tmp_path, "".join(lines))
    prefix = "(T pid=7) " if form in ("slime", "openrlhf") else "(s pid=4) " if form == "skyrl" else ""
    (log,) = _logs(tmp_path, "".join([*lines[:20], prefix + sample, *lines[20:]]))
    assert log.trace.steps.equals(clean.trace.steps)


@pytest.mark.parametrize("form", ["verl", "megatron", "prime"])
def test_records_glued_together_keep_their_numbers(tmp_path: Path, form: str) -> None:
    lines = [FORMATS[form].format(n=n) for n in range(1, 7)]
    (clean,) = _logs(tmp_path, "".join(lines))
    (log,) = _logs(tmp_path, "".join([*lines[:2], lines[2].rstrip("\n"), *lines[3:]]))
    assert log.trace.steps.equals(clean.trace.steps)


@pytest.mark.parametrize("form", ["verl", "megatron", "prime"])
@pytest.mark.parametrize("between", ["", "WARNING: x\n"])
def test_a_number_torn_by_a_line_end_is_said(tmp_path: Path, form: str, between: str) -> None:
    lines = [FORMATS[form].format(n=n).replace(f"{n}.5 ", f"{n}.5e-05 ") for n in range(1, 7)]
    cut = lines[2].index("3.5e-05") + 3
    (log,) = _logs(tmp_path, "".join([*lines[:2], lines[2][:cut] + "\n", between, lines[2][cut:], *lines[3:]]))
    assert "cut short" in _said(log)
    (clean,) = _logs(tmp_path, "".join(lines))
    assert "cut short" not in _said(clean)


def test_processes_that_print_dicts_at_the_same_time(tmp_path: Path) -> None:
    text = ""
    for n in range(1, 6):
        for label in "AB":
            text += f"({label} pid=1) Step {n}: \n"
        for label in "AB":
            text += f"({label} pid=1) {{'policy/final_loss': '{n}.{ord(label)}',\n"
        for label in "AB":
            text += f"({label} pid=1)  'policy/grad_norm': '1.5'}}\n"
    logs = _logs(tmp_path, text)
    assert [list(_values(log, "total_loss").values()) for log in logs] == [
        [float(f"{n}.{ord(label)}") for n in range(1, 6)] for label in "AB"
    ]


def test_a_run_killed_within_a_dict_and_resumed(tmp_path: Path) -> None:
    def step(n: int, loss: float) -> str:
        return f"INFO - Step {n}: \n{{'policy/final_loss': '{loss}',\n 'policy/grad_norm': '1.5'}}\n"

    (log,) = _logs(tmp_path, step(1, 0.1) + step(2, 0.2) + step(3, 0.3)[:40] + "\n" + step(2, 10.2) + step(3, 10.3))
    assert _values(log, "total_loss") == {1: 0.1, 2: 10.2, 3: 10.3}
    assert [(resume.step, resume.before) for resume in log.info.resumes] == [(2, 2)] or log.info.notes


def test_a_table_cut_by_a_kill_does_not_take_the_next_one(tmp_path: Path) -> None:
    def step(n: int, loss: float) -> str:
        cells = f"│ ppo_actor/update/actor_loss/avg │ {loss} │ ppo_actor/update/grad_norm │ 1.5 │"
        return f"Train step {n}/9 done.\n╒═══╕\n{cells}\n╘═══╛\n"

    (log,) = _logs(tmp_path, step(1, 0.1) + step(2, 0.2) + step(3, 0.3)[:-8] + "\n" + step(2, 10.2) + step(3, 10.3))
    assert log.trace.steps.index.tolist() == [1, 2, 3]
    assert log.original["ppo_actor/update/actor_loss/avg"].tolist()[-2:] == [10.2, 10.3]
    assert "a table that does not end" in _said(log)


def test_a_resume_at_the_epoch_of_the_last_row(tmp_path: Path) -> None:
    def row(loss: float, epoch: float) -> str:
        return f"{{'loss': {loss}, 'grad_norm': 1.0, 'learning_rate': 1e-6, 'epoch': {epoch}}}\n"

    first = "".join(row(n / 10, n / 10) for n in range(1, 6))
    (log,) = _logs(tmp_path, first + "".join(row(5 + n / 10, n / 10) for n in range(5, 9)))
    assert _values(log, "total_loss") == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4, 5: 5.5, 6: 5.6, 7: 5.7, 8: 5.8}
    (whole,) = _logs(tmp_path, "".join(row(n / 10, n // 4) for n in range(1, 21)))  # epochs as whole numbers
    assert len(whole.trace.steps) == 20


def test_dicts_that_are_no_rows_move_no_step(tmp_path: Path) -> None:
    stray = "Resuming with {'step': 0, 'epoch': 0}\nfor example {'loss': 3.0}\n"
    (log,) = _logs(tmp_path, stray + ROWS)
    assert _values(log, "total_loss") == {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}


@pytest.mark.parametrize("place", [0, 40])
def test_holes_of_nul_bytes_are_left_out(tmp_path: Path, place: int) -> None:
    (log,) = _logs(tmp_path, ROWS[:place] + "\0" * 600 + ROWS[place:])
    assert list(_values(log, "total_loss").values()) == [0.1, 0.2, 0.3, 0.4]
    assert "NUL bytes" in _said(log)


@pytest.mark.parametrize(
    "labels",
    [("0: ", "1: "), ("[1,0]<stdout>:", "[1,1]<stdout>:"), ("node-3: ", "node-4: ")],
)
@pytest.mark.parametrize("form", ["verl", "megatron", "prime", "openrlhf"])
def test_labels_of_launchers_tell_tasks_apart(tmp_path: Path, labels: tuple[str, str], form: str) -> None:
    text = "".join(label + FORMATS[form].format(n=n) for n in range(1, 6) for label in labels)
    logs = _logs(tmp_path, text)
    assert [len(log.trace.steps) for log in logs] == [5, 5]
    assert not any(log.info.resumes for log in logs)


@pytest.mark.parametrize("form", FORMATS)
def test_stamps_of_container_runtimes_are_no_part_of_a_line(tmp_path: Path, form: str) -> None:
    text = "".join(FORMATS[form].format(n=n) for n in range(1, 6))
    (clean,) = _logs(tmp_path, text)
    (log,) = _logs(tmp_path, "".join(f"2025-09-01T10:00:00.123456789Z {line}\n" for line in text.splitlines()))
    assert log.trace.steps.equals(clean.trace.steps)


def test_what_was_converted_is_read_back(tmp_path: Path) -> None:
    names = ["policy_loss", "kl_old", "prob_diff_mean", "grad_norm", "zero_variance_groups"]
    text = ",".join(["step", *names]) + "\n" + "\n".join(f"{n},0.1,0.2,0.3,0.4,0.5" for n in range(3)) + "\n"
    (log,) = _logs(tmp_path, text, "x.csv")
    assert log.info.framework == "moeproxy"
    assert sorted(log.trace.signals) == sorted(names)


@pytest.mark.parametrize("cut", [8, 20, 30])
def test_a_torn_object_before_a_whole_one_on_its_line(tmp_path: Path, cut: int) -> None:
    rows = [f'{{"step": {n}, "loss": {n}.5, "r": {{"a": 1, "b": 2}}}}' for n in range(1, 5)]
    (log,) = _logs(tmp_path, "\n".join([rows[0], rows[1][:cut] + rows[1], *rows[2:]]) + "\n", "x.jsonl")
    assert _values(log, "total_loss") == {n: n + 0.5 for n in range(1, 5)}
    assert "cut short" in _said(log)


def test_the_inside_of_a_torn_object_is_no_row(tmp_path: Path) -> None:
    (log,) = _logs(
        tmp_path, '{"step": 1, "loss": 1.5}\n{"step": 2, "r": {"loss": 9.0}\n{"step": 3, "loss": 3.5}\n', "x.jsonl"
    )
    assert _values(log, "total_loss") == {1: 1.5, 3: 3.5}
    assert len(log.original) == 2


def test_processes_glued_onto_one_line_stay_what_they_are(tmp_path: Path) -> None:
    text = ""
    for n in range(40):
        end = "" if n % 7 == 3 else "\n"
        text += f"(Rollout pid=5) data.py:2 - rollout {n}: {{'rollout/raw_reward': {n}.25, 'rollout/step': {n}}}{end}"
        text += (
            f"(Train pid=7) model.py:5 - step {n}: {{'train/loss': {n}.5, 'train/grad_norm': 0.5, 'train/step': {n}}}\n"
        )
    (log,) = _logs(tmp_path, text)
    assert _values(log, "total_loss") == {n: n + 0.5 for n in range(40)}
    assert _values(log, "reward_mean") == {n: n + 0.25 for n in range(40)}


def test_a_few_torn_lines_make_no_clock_of_their_own(tmp_path: Path) -> None:
    text = ""
    for n in range(40):
        text += f"(R pid=5) rollout {n}: {{'rollout/raw_reward': {n}.25, 'rollout/step': {n}}}\n" if n % 13 else ""
        text += f"(R pid=5) step {n}: {{'train/loss': {n}.5, 'train/grad_norm': 0.5, 'train/step': {n}}}\n"
    (log,) = _logs(tmp_path, text)
    assert log.counts("reward_mean") == {"measured": 36, "missing": 4}


def test_lines_that_lost_their_label_are_no_process_of_their_own(tmp_path: Path) -> None:
    text = ""
    for n in range(40):
        label = "" if n % 9 == 4 else "(T pid=7) "
        text += f"(T pid=7) rollout {n}: {{'rollout/raw_reward': {n}.25, 'rollout/step': {n}}}\n"
        text += f"{label}step {n}: {{'train/loss': {n}.5, 'train/grad_norm': 0.5, 'train/step': {n}}}\n"
    (log,) = _logs(tmp_path, text)
    assert _values(log, "total_loss") == {n: n + 0.5 for n in range(40)}


def test_a_hole_within_a_number_makes_no_other_number(tmp_path: Path) -> None:
    text = "step:1 - actor/grad_norm:0.5 - actor/lr:1e\0-6\nstep:2 - actor/grad_norm:0.2\0\0005 - actor/lr:1e-6\n"
    (log,) = _logs(tmp_path, text)
    assert log.counts("grad_norm") == {"measured": 1, "text": 1}
    assert _values(log, "grad_norm")[1] == 0.5


def test_a_number_beyond_float64_is_infinite_and_said_to_be(tmp_path: Path) -> None:
    (log,) = _logs(tmp_path, "step,loss,reward\n1,0.5e999,1\n2,-1e999,1\n", "x.csv")
    assert log.counts("total_loss") == {"pos inf": 1, "neg inf": 1}


def test_nested_rows_that_end_in_a_comma(tmp_path: Path) -> None:
    (log,) = _logs(tmp_path, '{"step": 1, "data": {"actor/grad_norm": 0.5}},\n' * 2, "x.jsonl")
    assert _values(log, "grad_norm") == {1: 0.5}
