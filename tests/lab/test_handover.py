"""The hand-over to verl: every setting under verl's name, only keys verl knows, nothing half written or overwritten.

That verl itself accepts these configs and logs what they say is checked by `tests.lab.verl_check`, which needs verl.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from moeproxy.errors import CheckpointError, LabError, MoeproxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.lab import handover
from moeproxy.lab.settings import GRPOSettings
from moeproxy.lab.verl_job import VERL, VerlJob, verl_config
from moeproxy.lab.verl_log import log_keys, verl_signals
from moeproxy.proxy.build import build
from moeproxy.proxy.cost import cost
from moeproxy.traces.signals import SIGNALS
from tests.proxy.made_up import plan_for

KNOWN = json.loads((Path(__file__).parent / "verl_keys.json").read_text("utf-8"))
SETTINGS = GRPOSettings(
    steps=7,
    prompts=16,
    samples=4,
    learning_rate=2e-6,
    beta=0.03,
    temperature=0.9,
    max_new_tokens=40,
    rollout_dtype="bfloat16",
    dtype="bfloat16",
)
LOG = Path("/logs/log.jsonl")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": "1+1="}], "data_source": "x", "reward_model": {"ground_truth": "2"}}
    ]
    pd.DataFrame(rows * 20).to_parquet(tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


@pytest.fixture
def job(qwen3: Path, data: Path) -> VerlJob:
    return VerlJob(qwen3, (data,), settings=SETTINGS, seed=5, max_prompt_tokens=24)


@pytest.fixture(scope="module")
def proxy(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = Checkpoint.open(qwen3)
    return build(checkpoint, plan_for(checkpoint, 8), tmp_path_factory.mktemp("proxies") / "proxy-8").path


def flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {at: value}
    return {key: leaf for name, inner in value.items() for key, leaf in flat(inner, f"{at}.{name}".lstrip(".")).items()}


def variants(job: VerlJob) -> list[VerlJob]:
    off = replace(SETTINGS, beta=0.0)
    return [
        job,
        replace(job, old_log_probs="trainer"),
        replace(job, settings=off, router_load=False, offload=False, reward=Path("reward.py"), reward_name="score"),
    ]


def test_every_setting_has_its_value_under_verls_name(job: VerlJob) -> None:
    found = flat(verl_config(replace(job, nodes=2, tensor_parallel=2, tokens_per_gpu=999), LOG))
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    right = {
        "trainer.total_training_steps": 7,
        "data.train_batch_size": 16,
        f"{actor}ppo_mini_batch_size": 16,
        f"{rollout}n": 4,
        f"{actor}optim.lr": 2e-6,
        f"{actor}use_kl_loss": True,
        f"{actor}kl_loss_coef": 0.03,
        f"{rollout}temperature": 0.9,
        f"{rollout}dtype": "bfloat16",
        f"{actor}fsdp_config.model_dtype": "bfloat16",
        "data.max_response_length": 40,
        "data.max_prompt_length": 24,
        f"{actor}ppo_max_token_len_per_gpu": 999,
        "data.seed": 5,
        f"{rollout}seed": 5,
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 8,
        f"{rollout}tensor_model_parallel_size": 2,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        f"{actor}policy_loss.loss_mode": "bypass_mode",
        "actor_rollout_ref.model.path": str(job.model),
        "data.train_files": [str(job.train_files[0])],
        "data.val_files": [str(job.train_files[0])],
        "trainer.logger": ["console", "file"],
        "trainer.rollout_data_dir": "/logs/responses",
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH": "/logs/log.jsonl",
    }
    assert {key: found[key] for key in right} == right


def test_switches_change_what_they_name(job: VerlJob) -> None:
    plain, recomputed, off = (flat(verl_config(item, LOG)) for item in variants(job))
    actor = "actor_rollout_ref.actor."
    assert {key for key in plain if plain[key] != recomputed[key]} == {
        "algorithm.rollout_correction.bypass_mode",
        f"{actor}policy_loss.loss_mode",
        f"{actor}calculate_entropy",
    }
    assert {key for key in off if off[key] != plain.get(key)} == {
        f"{actor}use_kl_loss",
        f"{actor}kl_loss_coef",
        f"{actor}fsdp_config.param_offload",
        f"{actor}fsdp_config.optimizer_offload",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay",
        "actor_rollout_ref.rollout.moe_load_balance_metrics_interval",
        "reward.custom_reward_function.path",
        "reward.custom_reward_function.name",
    }
    assert off["reward.custom_reward_function.name"] == "score"


def test_only_keys_that_verl_knows_are_written(job: VerlJob) -> None:
    written = {key for item in variants(job) for key in flat(verl_config(item, LOG))}
    ours = {"hydra.searchpath", "defaults"}
    assert written - ours == set(KNOWN["config"]), (
        "run `python -m tests.lab.verl_check --write` with verl's environment"
    )
    assert KNOWN["verl"] == VERL


def test_every_signal_has_verls_metric_or_a_reason(job: VerlJob) -> None:
    named = set()
    for item in variants(job):
        keys = log_keys(item, LOG)
        assert set(keys["signals"]) | set(keys["missing"]) == set(SIGNALS)
        assert not set(keys["signals"]) & set(keys["missing"])
        assert all(keys["missing"].values())
        assert {n: SIGNALS[n].unit for n in keys["signals"]} == {n: s["unit"] for n, s in keys["signals"].items()}
        assert all(s["per_layer"] == SIGNALS[n].per_layer for n, s in keys["signals"].items())
        named |= {signal["key"] for signal in keys["signals"].values()}
    assert named == set(KNOWN["metrics"])


def test_the_log_follows_the_switches(job: VerlJob) -> None:
    plain, recomputed, off = (verl_signals(item) for item in variants(job))
    assert plain["logprob_diff_k1"][0] == "actor/rollout_corr/kl"
    assert recomputed["logprob_diff_k1"][0] == "rollout_corr/kl"
    assert set(recomputed) - set(plain) == {"prob_pearson"}
    assert set(plain) - set(off) == {"kl", "router_max_violation"}


def test_what_is_written_is_read_back(job: VerlJob, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**_):\n    return 1.0\n")
    job = replace(job, reward=reward)
    folder = handover.write_verl(job, tmp_path / "out")
    log = folder / "log.jsonl"
    assert sorted(path.name for path in folder.iterdir()) == ["grpo.yaml", "job.json", "log_keys.json", "run.sh"]
    assert yaml.safe_load((folder / "grpo.yaml").read_text("utf-8")) == verl_config(job, log)
    assert json.loads((folder / "log_keys.json").read_text("utf-8")) == log_keys(job, log)
    assert handover.read_job(folder) == job


def test_original_and_proxy_differ_in_path_name_and_devices_only(job: VerlJob, proxy: Path, tmp_path: Path) -> None:
    size = 18 * cost(Checkpoint.open(job.model)).params / 0.8 / 2**30
    folders = handover.write_pair(job, [job.model, proxy], tmp_path / "out", device_gib=size / 3.5)
    original, small = (flat(yaml.safe_load((path / "grpo.yaml").read_text("utf-8"))) for path in folders)
    assert original["trainer.n_gpus_per_node"] == 4
    assert small["trainer.n_gpus_per_node"] < 4
    assert {key for key in original if original[key] != small[key]} == {
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "trainer.experiment_name",
        "trainer.n_gpus_per_node",
        "trainer.rollout_data_dir",
        "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH",
    }
    assert [path.name for path in folders] == ["qwen3-moe-tiny", "proxy-8"]


@pytest.mark.parametrize(
    ("need", "per_node", "nodes", "gpus", "tensor"),
    [
        (1, 8, 1, 1, 1),
        (2, 8, 1, 2, 2),
        (3, 8, 1, 4, 4),
        (5, 8, 1, 8, 4),
        (8, 8, 1, 8, 4),
        (9, 8, 2, 8, 4),
        (3, 4, 1, 4, 4),
    ],
)
def test_devices_are_a_part_of_a_node_or_whole_nodes(
    job: VerlJob, need: int, per_node: int, nodes: int, gpus: int, tensor: int
) -> None:
    size = 18 * cost(Checkpoint.open(job.model)).params / 0.8 / 2**30
    found = handover.placed(job, job.model, device_gib=size / (need - 0.5), per_node=per_node)
    assert (found.nodes, found.gpus_per_node, found.tensor_parallel) == (nodes, gpus, tensor)


def _settings(job: VerlJob, **changes: Any) -> VerlJob:
    return replace(job, settings=replace(SETTINGS, **changes))


BAD_JOBS: dict[str, tuple[Callable[[VerlJob], VerlJob], str]] = {
    "tools": (lambda job: _settings(job, environment="calculator"), "verl takes its tasks from train_files"),
    "file": (lambda job: _settings(job, environment="file", task_file="x"), "verl takes its tasks from train_files"),
    "sync": (lambda job: _settings(job, sync_dtype="float16"), "bfloat16, which verl always sends"),
    "nodes": (lambda job: replace(job, nodes=0), "nodes is 0"),
    "old": (lambda job: replace(job, old_log_probs="none"), "one of rollout, trainer"),
    "data": (lambda job: replace(job, train_files=()), "at least one Parquet"),
    "label": (lambda job: replace(job, label="a/b"), "a name that can be a folder's"),
    "hidden": (lambda job: replace(job, label=".."), "a name that can be a folder's"),
    "tokens": (lambda job: replace(job, tokens_per_gpu=63), "may have 64 tokens"),
    "tensor": (lambda job: replace(job, tensor_parallel=3), "a divisor of gpus_per_node"),
    "shares": (lambda job: replace(job, nodes=3), "64 responses a step cannot be shared by 24 devices"),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_impossible_jobs_are_refused(job: VerlJob, name: str) -> None:
    change, message = BAD_JOBS[name]
    with pytest.raises(LabError, match=message):
        change(job)


def test_bad_inputs_are_refused_and_leave_nothing(job: VerlJob, tmp_path: Path) -> None:
    text, columns, out = tmp_path / "text.parquet", tmp_path / "columns.parquet", tmp_path / "out"
    text.write_text("no Parquet")
    pd.DataFrame({"prompt": ["x"], "data_source": ["y"]}).to_parquet(columns)
    refused: list[tuple[dict[str, Any], type[MoeproxyError], str]] = [
        ({"train_files": (tmp_path / "none.parquet",)}, LabError, "no such file"),
        ({"train_files": (text,)}, LabError, "no Parquet"),
        ({"train_files": (columns,)}, LabError, "reward_model are missing"),
        ({"val_files": (columns,)}, LabError, "reward_model are missing"),
        ({"settings": replace(SETTINGS, prompts=24)}, LabError, "hold 20 prompts, a step needs 24"),
        ({"tensor_parallel": 8}, LabError, "4 attention heads cannot be shared by 8"),
        ({"reward": tmp_path / "none.py"}, LabError, "no such file"),
        ({"model": tmp_path / "nowhere"}, CheckpointError, "no such directory"),
    ]
    for change, error, message in refused:
        with pytest.raises(error, match=message):
            handover.write_verl(replace(job, **change), out)
    assert not out.exists()
    with pytest.raises(LabError, match="per_node is 0"):
        handover.placed(job, job.model, per_node=0)


def test_nothing_is_overwritten(job: VerlJob, proxy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    handover.write_verl(job, out / "proxy-8")
    before = {path.name: path.read_bytes() for path in (out / "proxy-8").iterdir()}
    with pytest.raises(LabError, match="exists already"):
        handover.write_verl(replace(job, seed=9), out / "proxy-8")
    with pytest.raises(LabError, match="exists already"):
        handover.write_pair(job, [job.model, proxy], out)
    with pytest.raises(LabError, match="same name"):
        handover.write_pair(job, [job.model, job.model], tmp_path / "other")
    assert {path.name: path.read_bytes() for path in (out / "proxy-8").iterdir()} == before
    assert [path.name for path in out.iterdir()] == ["proxy-8"]
    assert not (tmp_path / "other").exists()


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no job"):
        handover.read_job(tmp_path)
    (tmp_path / "job.json").write_text('{"job": {"settings": {"colour": 1}}}')
    with pytest.raises(LabError, match="no job"):
        handover.read_job(tmp_path)


def test_the_script_starts_verl_on_its_config_unless_a_log_would_be_emptied(job: VerlJob, tmp_path: Path) -> None:
    folder = handover.write_verl(job, tmp_path / "a folder", log=tmp_path / "the log.jsonl")
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    environment = os.environ | {"PATH": f"{stub.parent}:{os.environ['PATH']}"}

    def start() -> subprocess.CompletedProcess[str]:
        command = ["sh", str(folder / "run.sh"), "trainer.nnodes=1"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=20)

    config = ["--config-path", str(folder), "--config-name", "grpo"]
    assert start().stdout.splitlines() == ["-m", "verl.trainer.main_ppo", *config, "trainer.nnodes=1"]
    (tmp_path / "the log.jsonl").write_text("a run\n")
    again = start()
    assert again.returncode == 1
    assert "would empty it" in again.stderr
    assert again.stdout == ""


def test_command_line(qwen3: Path, proxy: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(qwen3), "--proxy", str(proxy), "--train-files", str(data), "--prompts", "16"]
    arguments += ["--learning-rate", "3e-6", "--old-log-probs", "trainer", "--no-offload", "--device-gib", "80"]
    out = tmp_path / "out"
    assert handover.main([*arguments, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{name}: 1 x 1 GPUs, sh {out / name / 'run.sh'}" for name in ("qwen3-moe-tiny", "proxy-8")
    ]
    job = handover.read_job(out / "proxy-8")
    assert (job.model, job.settings.learning_rate, job.settings.steps) == (proxy, 3e-6, 60)
    assert (job.old_log_probs, job.offload, job.router_load) == ("trainer", False, True)
    assert handover.main([*arguments, "--out", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err
