"""Prompts of a run: the testbed's, or one's own file, and how answers are judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moeproxy.errors import FaultError, LabError
from moeproxy.lab import prompts
from moeproxy.lab.run import run
from moeproxy.lab.settings import GRPOSettings, Injection, RunSpec
from moeproxy.lab.train import read_spec


def tasks_file(folder: Path, *lines: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("so it is 1,234.", "1234", 1.0),
        ("#### 12", "12.0", 1.0),
        ("first 12, then 13", "12", 0.0),
        ("-3", "3", 0.0),
        ("none", "12", 0.0),
        (" yes ", "yes", 1.0),
        ("12", "yes", 0.0),
    ],
)
def test_numbers_are_scored_as_gsm8k_is(text: str, answer: str, value: float) -> None:
    assert prompts.number_reward(text, answer) == value


def test_a_file_of_tasks_is_read(tmp_path: Path) -> None:
    path = tasks_file(tmp_path, '{"prompt": "1+1=", "answer": 2}', "", '{"prompt": "Why?", "answer": "so", "id": 7}')
    settings = GRPOSettings(environment="file", task_file=str(path))
    assert [(t.prompt, t.answer) for t in prompts.pool(settings, 0)] == [("1+1=", "2"), ("Why?", "so")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is no task"),
        ('{"prompt": "a"}', "answer"),
        ("[1]", "line 2"),
        ('{"prompt": "", "answer": "a"}', "line 2"),
        ('{"prompt": "a", "answer": null}', "line 2"),
        ('{"prompt": "a", "answer": true}', "line 2"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    with pytest.raises(LabError, match=words):
        prompts.read_tasks(tasks_file(tmp_path, '{"prompt": "1+1=", "answer": 2}', line))


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such file"):
        prompts.read_tasks(tmp_path / "absent.jsonl")
    with pytest.raises(LabError, match="no task"):
        prompts.read_tasks(tasks_file(tmp_path, ""))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": "typo"}, "calculator"),
        ({"environment": "file"}, "task_file"),
        ({"task_file": "x"}, "task_file"),
        ({"environment": "calculator", "prompts": 3}, "even"),
        ({"engine": "vllm"}, "GPU"),
        ({"engine": "vllm", "device": "cuda", "environment": "calculator"}, "one turn"),
        ({"device": "tpu"}, "cuda"),
        ({"dtype": "int8"}, "bfloat16"),
    ],
)
def test_impossible_settings_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        GRPOSettings(**change)  # pyright: ignore[reportArgumentType]


def test_later_settings_are_stored_only_when_set() -> None:
    assert set(GRPOSettings().to_dict()).isdisjoint({"environment", "device", "dtype", "engine", "task_file"})
    changed = GRPOSettings(environment="calculator", dtype="bfloat16")
    assert GRPOSettings(**changed.to_dict()) == changed
    assert RunSpec.from_dict(RunSpec(Path("m"), settings=changed).to_dict()).settings == changed


def test_faults_of_the_labs_engine_need_it(qwen3: Path) -> None:
    settings = GRPOSettings(steps=2, engine="vllm", device="cuda")
    with pytest.raises(FaultError, match="rollout engine"):
        run(RunSpec(qwen3, settings=settings, injection=Injection("stale_rollout", 1.0, 1)))


def test_prompts_are_shared_out_evenly(qwen3: Path, short: GRPOSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(LabError, match="3 processes"):
        run(RunSpec(qwen3, settings=short))


def test_a_model_without_the_tools_characters_is_refused(qwen3: Path, short: GRPOSettings) -> None:
    with pytest.raises(LabError, match="-tools"):
        run(RunSpec(qwen3, settings=replace(short, environment="calculator")))


def test_own_prompts_are_trained_on_in_another_dtype(qwen3: Path, short: GRPOSettings, tmp_path: Path) -> None:
    path = tasks_file(tmp_path, *(json.dumps({"prompt": f"{n}+{n + 1}=", "answer": 2 * n + 1}) for n in range(10, 40)))
    settings = replace(short, environment="file", task_file=str(path), dtype="bfloat16", rollout_dtype="bfloat16")
    trace = run(RunSpec(qwen3, settings=settings))
    assert trace.values("reward_mean").mean() > 0.2  # the model knows sums: its answers are judged rightly
    assert trace.provenance.config["dtype"] == "bfloat16"


def test_settings_are_read_from_a_file(tmp_path: Path) -> None:
    spec = RunSpec(Path("m"), seed=3, injection=Injection("kl_sign", 0.5, 2), settings=GRPOSettings(steps=9))
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec.to_dict()))
    assert read_spec(path) == spec
    path.write_text('{"model": "m", "settings": {"steps": 9}}')
    assert read_spec(path) == RunSpec(Path("m"), settings=GRPOSettings(steps=9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "no readable"),
        ("[]", "no model"),
        ("{}", "no model"),
        ('{"model": "m", "sed": 1}', "'sed'"),
        ('{"model": "m", "settings": {"step": 1}}', "'step'"),
        ('{"model": "m", "injection": {"id": "x"}}', "'id'"),
    ],
)
def test_broken_settings_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(text)
    with pytest.raises(LabError, match=words):
        read_spec(path)
