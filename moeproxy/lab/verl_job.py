"""One GRPO job for verl: the lab's settings under verl's names, as a config that verl composes over its own.

verl keeps its defaults in hydra files; what is written here names only what the lab decides. The keys are those of verl
0.9.1: `tests/lab/verl_check.py` has verl compose and validate such a config, and lists the keys in `verl_keys.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moeproxy.errors import LabError
from moeproxy.lab.settings import GRPOSettings

VERL = "0.9.1"
OLD_LOG_PROBS = ("rollout", "trainer")
SETTINGS = GRPOSettings(
    steps=60,
    prompts=128,
    samples=8,
    learning_rate=1e-6,
    beta=1e-3,
    max_new_tokens=2048,
    rollout_dtype="bfloat16",
)
"""Settings for a model of real size; the lab's own defaults are those of its testbed."""

_PATHS = ("model", "reward")
_LISTS = ("train_files", "val_files")


@dataclass(frozen=True)
class VerlJob:
    """What verl needs to know to run GRPO on one checkpoint.

    Args:
        model: directory of the checkpoint, original or proxy, as every node sees it.
        train_files: Parquet files in verl's layout (`prompt`, `data_source`, `reward_model`).
        val_files: the same for validation, which the job does not run but verl wants to open; default: `train_files`.
        label: name of the model in logs.
        settings: of the loop. `tasks`, `task_seed`, `threads`, `device` and `engine` say nothing to verl: it takes its
            tasks from files, and runs on GPUs with vLLM.
        seed: of prompt order, minibatches and sampling; jobs of equal seed see the same prompts in the same order.
        nodes, gpus_per_node: devices of the job.
        tensor_parallel: devices that share one copy of the rollout engine (vLLM).
        max_prompt_tokens: longer prompts are left out.
        tokens_per_gpu: tokens that one device works on at a time.
        old_log_probs: `rollout` takes the rollout engine's log-probs as the old ones, as the lab does: a mismatch of
            the engines reaches the loss (verl's bypass mode). `trainer` recomputes them, which is verl's default.
        offload: keep weights and optimizer state in the host's memory while they are not needed.
        router_load: log the experts' load; the rollout engine must report its choices (vLLM 0.22 or newer).
        reward: a Python file with the reward function; None: verl's own, chosen by `data_source`.
        reward_name: the function's name in `reward`.

    Raises:
        LabError: a setting that verl could not run, or could only run as something else.
    """

    model: Path
    train_files: tuple[Path, ...]
    val_files: tuple[Path, ...] = ()
    label: str = "original"
    settings: GRPOSettings = field(default_factory=lambda: SETTINGS)
    seed: int = 0
    nodes: int = 1
    gpus_per_node: int = 8
    tensor_parallel: int = 4
    max_prompt_tokens: int = 1024
    tokens_per_gpu: int = 32768
    old_log_probs: str = "rollout"
    offload: bool = True
    router_load: bool = True
    reward: Path | None = None
    reward_name: str = "compute_score"

    def __post_init__(self) -> None:
        for name in _PATHS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _absolute(value))
        for name in _LISTS:
            object.__setattr__(self, name, tuple(_absolute(path) for path in getattr(self, name)))
        _check_settings(self.settings)
        _check_numbers(self)
        _check_devices(self)

    @property
    def gpus(self) -> int:
        """Devices in all."""
        return self.nodes * self.gpus_per_node

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values that `from_dict` reads back."""
        plain = {name: [str(path) for path in getattr(self, name)] for name in _LISTS}
        reward = str(self.reward) if self.reward else None
        settings = self.settings.to_dict()
        return {**asdict(self), **plain, "model": str(self.model), "reward": reward, "settings": settings}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> VerlJob:
        """Return the job that `to_dict` wrote."""
        paths = {name: tuple(Path(path) for path in stored[name]) for name in _LISTS}
        reward = Path(stored["reward"]) if stored["reward"] else None
        settings = GRPOSettings(**stored["settings"])
        return cls(**{**stored, **paths, "model": Path(stored["model"]), "reward": reward, "settings": settings})


def _absolute(path: Path) -> Path:
    # Ray's workers have working directories of their own.
    return path.expanduser().absolute()


def _check_settings(settings: GRPOSettings) -> None:
    if settings.environment != "arithmetic":
        raise LabError(
            f"environment is {settings.environment!r}",
            expected="its default: verl takes its tasks from train_files",
            remedy="put the tasks into a Parquet file, or run them here with moeproxy.lab.train",
        )
    if settings.sync_dtype != "bfloat16":
        raise LabError(f"sync_dtype is {settings.sync_dtype!r}", expected="bfloat16, which verl always sends")


def _check_numbers(job: VerlJob) -> None:
    for name in ("nodes", "gpus_per_node", "tensor_parallel", "max_prompt_tokens", "tokens_per_gpu"):
        if getattr(job, name) < 1:
            raise LabError(f"{name} is {getattr(job, name)}", expected="at least 1")
    if job.old_log_probs not in OLD_LOG_PROBS:
        raise LabError(f"old_log_probs is {job.old_log_probs!r}", expected=f"one of {', '.join(OLD_LOG_PROBS)}")
    if not job.train_files:
        raise LabError("no train_files", expected="at least one Parquet file in verl's layout")
    if not job.label or set(job.label) & set("/\\ ") or job.label.startswith("."):
        raise LabError(f"label is {job.label!r}", expected="a name that can be a folder's, without spaces")
    longest = job.max_prompt_tokens + job.settings.max_new_tokens
    if job.tokens_per_gpu < longest:
        raise LabError(
            f"tokens_per_gpu is {job.tokens_per_gpu}, but a sequence may have {longest} tokens",
            remedy="raise tokens_per_gpu, or lower max_prompt_tokens or max_new_tokens",
        )


def _check_devices(job: VerlJob) -> None:
    if job.gpus_per_node % job.tensor_parallel:
        raise LabError(
            f"tensor_parallel is {job.tensor_parallel} on {job.gpus_per_node} devices a node",
            expected="a divisor of gpus_per_node: every copy of the rollout engine stays in one node",
        )
    responses = job.settings.prompts * job.settings.samples
    if responses % job.gpus:
        raise LabError(
            f"{responses} responses a step cannot be shared by {job.gpus} devices",
            expected="prompts x samples divisible by the devices",
            remedy="change prompts, samples or the devices",
        )


def verl_config(job: VerlJob, log: Path) -> dict[str, Any]:
    """Return the config of a job as nested plain values, as `write_verl` puts it into a YAML file.

    Args:
        job: what to run.
        log: JSON-lines file that verl will write; responses go to the folder `responses` beside it.
    """
    config: dict[str, Any] = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
        "defaults": ["ppo_trainer", "_self_"],
        "algorithm": {
            "adv_estimator": "grpo",
            "norm_adv_by_std_in_grpo": True,
            "use_kl_in_reward": False,
            "rollout_correction": {"bypass_mode": job.old_log_probs == "rollout"},
        },
        "data": _data(job),
        "actor_rollout_ref": {
            "model": {
                "path": str(job.model),
                "use_remove_padding": True,
                "enable_gradient_checkpointing": True,
            },
            "actor": _actor(job),
            "ref": {"fsdp_config": {"param_offload": job.offload}},
            "rollout": _rollout(job),
        },
        "trainer": _trainer(job, log),
        # The logger's only setting is the environment of the process that logs, which Ray starts.
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"VERL_FILE_LOGGER_PATH": str(log)}}}},
    }
    if job.reward:
        config["reward"] = {"custom_reward_function": {"path": str(job.reward), "name": job.reward_name}}
    return config


def _data(job: VerlJob) -> dict[str, Any]:
    return {
        "train_files": [str(path) for path in job.train_files],
        "val_files": [str(path) for path in job.val_files or job.train_files],
        "train_batch_size": job.settings.prompts,
        "max_prompt_length": job.max_prompt_tokens,
        "max_response_length": job.settings.max_new_tokens,
        "filter_overlong_prompts": True,
        "truncation": "error",
        "shuffle": True,
        "seed": job.seed,
    }


def _actor(job: VerlJob) -> dict[str, Any]:
    settings = job.settings
    bypass = job.old_log_probs == "rollout"
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": settings.prompts,  # one update a step, as in the lab
        "ppo_epochs": 1,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": job.tokens_per_gpu,
        "data_loader_seed": job.seed,
        "loss_agg_mode": "token-mean",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "policy_loss": {"loss_mode": "bypass_mode" if bypass else "vanilla"},
        "entropy_coeff": 0.0,
        # Without recomputed log-probs nothing else measures the entropy.
        "calculate_entropy": bypass,
        "use_kl_loss": settings.beta > 0,
        "kl_loss_coef": settings.beta,
        "kl_loss_type": "low_var_kl",
        "optim": {
            "lr": settings.learning_rate,
            "lr_scheduler_type": "constant",
            "lr_warmup_steps": 0,
            "weight_decay": 0.0,
            "clip_grad": 1.0,
        },
        "fsdp_config": {
            "model_dtype": settings.dtype,
            "param_offload": job.offload,
            "optimizer_offload": job.offload,
            "seed": job.seed,
        },
    }


def _rollout(job: VerlJob) -> dict[str, Any]:
    return {
        "name": "vllm",
        "n": job.settings.samples,
        "temperature": job.settings.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "dtype": job.settings.rollout_dtype,
        "seed": job.seed,
        "tensor_model_parallel_size": job.tensor_parallel,
        "gpu_memory_utilization": 0.6,
        "calculate_log_probs": True,
        "enable_rollout_routing_replay": job.router_load,  # only makes vLLM report its choices; FSDP replays none
        "moe_load_balance_metrics_interval": int(job.router_load),
    }


def _trainer(job: VerlJob, log: Path) -> dict[str, Any]:
    return {
        "project_name": "moeproxy",
        "experiment_name": job.label,
        "logger": ["console", "file"],
        "rollout_data_dir": str(log.parent / "responses"),
        "nnodes": job.nodes,
        "n_gpus_per_node": job.gpus_per_node,
        "total_training_steps": job.settings.steps,
        "total_epochs": job.settings.steps,  # an epoch has at least one step, so steps decide
        "val_before_train": False,
        "test_freq": -1,
        "save_freq": -1,
        "resume_mode": "disable",  # a resumed run would overwrite the log of its first part
    }
