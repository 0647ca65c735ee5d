"""What `verl_check` runs in verl's own environment: compose, validate, build config classes, compute logged metrics."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

# Ray's setting for its own logger, which takes any environment variable; verl's config cannot know it.
FREE = ("ray_kwargs.ray_init.runtime_env.env_vars.",)


def work(folder: Path) -> None:
    """Check every config below `folder`, compute the metrics of the made-up batch, write `results.json`."""
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {"versions": _versions(), "configs": {}, "metrics": {}}
    batch = dict(np.load(folder / "batch.npz"))
    for path in sorted(folder.glob("configs/*/*/grpo.yaml")):
        name = "/".join(path.parent.relative_to(folder / "configs").parts)
        try:
            results["configs"][name], config = _judge(path.parent)
        except BaseException as error:  # hydra ends the process where it refuses a config
            results["configs"][name] = {"refused": f"{type(error).__name__}: {error}"}
            continue
        results["metrics"][name] = _metrics(config, batch)
    results["bad"] = {name: _refusal(folder, change) for name, change in BAD.items()}
    (folder / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("verl", "hydra-core", "omegaconf", "transformers", "torch", "ray")}


# What verl must refuse; it shows that the check can fail.
BAD = {
    "unknown key": ["actor_rollout_ref.actor.learning_rate=1"],
    "no such aggregation": ["actor_rollout_ref.actor.loss_agg_mode=mean"],
    "batch sizes": [
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1000",
    ],
}


def _refusal(folder: Path, change: list[str]) -> str:
    path = next(iter(sorted(folder.glob("configs/*/*/grpo.yaml"))))
    try:
        _through_main(path.parent, change)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def _through_main(folder: Path, change: list[str]) -> Any:
    """Start verl's `main_ppo` with the arguments of run.sh and stop where it would start Ray; return its config."""
    import verl.trainer.main_ppo as main_ppo
    from hydra.core.global_hydra import GlobalHydra

    caught: list[Any] = []
    main_ppo.run_ppo = lambda config, task_runner_class: caught.append((config, task_runner_class))
    GlobalHydra.instance().clear()
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with tempfile.TemporaryDirectory() as scratch:
        further = [f"hydra.run.dir={scratch}", *change]
        sys.argv = ["main_ppo.py", "--config-path", str(folder), "--config-name", "grpo", *further]
        main_ppo.main()
    config, runner = caught[0]
    if runner is not main_ppo.TaskRunnerV1:
        raise RuntimeError("verl chose its old trainer")
    return config


def _judge(folder: Path) -> tuple[dict[str, Any], Any]:
    import yaml

    config = _through_main(folder, [])
    written = yaml.safe_load((folder / "grpo.yaml").read_text("utf-8"))
    own = {key for part in ("hydra", "defaults") for key in _flat(written.pop(part), part)}
    known = set(_flat(_defaults()))
    keys = sorted(set(_flat(written)) - own)
    lost = [key for key in keys if not _same(_get(config, key), _flat(written)[key])]
    return {
        "keys": keys,
        "unknown": [key for key in keys if key not in known and not key.startswith(FREE)],
        "lost": lost,
        "built": list(_classes(config)),
    }, config


def _defaults() -> Any:
    """verl's own config without ours."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        return OmegaConf.to_container(compose("ppo_trainer"), resolve=False)


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {at: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{at}.{name}" if at else str(name))
    return found


def _get(config: Any, key: str) -> Any:
    from omegaconf import OmegaConf

    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _same(found: Any, written: Any) -> bool:
    return type(found) is type(written) and found == written


def _classes(config: Any) -> Iterator[str]:
    """Build what verl's workers build from the config; each constructor has checks of its own."""
    from verl.trainer.ppo.reward import get_custom_reward_fn
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.torch_dtypes import PrecisionType

    part = config.actor_rollout_ref
    for name, node in (
        ("algorithm", config.algorithm),
        ("actor", part.actor),
        ("ref", _reference(part)),
        ("rollout", part.rollout),
        ("model", part.model),  # reads the checkpoint's config and tokenizer
    ):
        built = omega_conf_to_dataclass(node)
        yield f"{name}: {type(built).__name__}"
    yield f"weights: {PrecisionType.to_dtype(part.actor.fsdp_config.model_dtype)}"
    if config.reward.custom_reward_function.path:
        yield f"reward: {get_custom_reward_fn(config)('', '', '')}"
    yield f"trainer: {type(get_trainer_cls(config.trainer.v1.trainer_mode)(config)).__name__}"


def _reference(part: Any) -> Any:
    """The reference model's config with the renaming that verl's worker does before it builds the class."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(part.ref, resolve=True)
    node["ppo_mini_batch_size"] = part.actor.ppo_mini_batch_size
    for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
        node[f"ppo_{name}"] = node.pop(f"log_prob_{name}")
    node["use_dynamic_bsz"] = node.pop("log_prob_use_dynamic_bsz")
    return OmegaConf.create(node)


def _metrics(config: Any, batch: dict[str, np.ndarray]) -> dict[str, float]:
    """Return what verl's functions log of the made-up batch in one step, under the names that reach the log."""
    import torch
    from verl.utils.config import omega_conf_to_dataclass

    tensors = {name: torch.from_numpy(value) for name, value in batch.items()}
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    bypass = bool(config.algorithm.rollout_correction.bypass_mode)
    found = _update(actor, tensors, bypass)
    if not bypass:
        found |= _recomputed(config, tensors, actor)
    found |= _step(config, tensors)
    return {name: float(value) for name, value in found.items()}


def _nested(rows: Any, lengths: Any) -> Any:
    import torch

    parts = [row[:n] for row, n in zip(rows, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def _update(actor: Any, t: dict[str, Any], bypass: bool) -> dict[str, Any]:
    """`ppo_loss` and the worker's post-processing, as in an update of the actor on one device."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    lengths, n = t["lengths"], len(t["lengths"])
    whole = lengths + 2  # two prompt tokens

    def shifted(rows: Any) -> Any:
        """Model outputs belong to the token before: one filler for the prompt's first token, one at the end."""
        filler = torch.zeros(n, 1, dtype=rows.dtype)
        return _nested(torch.cat([filler, rows, filler], dim=1), whole)

    fields = {
        "prompts": _nested(torch.zeros(n, 2, dtype=torch.long), torch.full((n,), 2)),
        "responses": _nested(t["tokens"], lengths),
        "response_mask": _nested(t["mask"], lengths),
        "old_log_probs": _nested(t["rollout"] if bypass else t["trained"], lengths),
        "ref_log_prob": _nested(t["reference"], lengths),
        "advantages": _nested(t["advantages"], lengths),
    }
    sizes = {"dp_size": 1, "batch_num_tokens": int(lengths.sum()), "global_batch_size": n}
    data = tu.get_tensordict(fields, non_tensor_dict=sizes)
    outputs = {"log_probs": shifted(t["trained"])}
    if actor.calculate_entropy:
        outputs["entropy"] = shifted(t["entropy"])
    loss, metrics = ppo_loss(actor, outputs, data)
    worker = types.SimpleNamespace(
        device_name="cpu",
        flops_counter=None,
        engine=types.SimpleNamespace(get_data_parallel_group=lambda: None),
    )
    output = {"loss": [loss.item()], "metrics": {**metrics, "grad_norm": 0.5, "lr": 1e-6}}
    done = TrainingWorker._postprocess_output(
        worker, output, global_token_num=None, delta_time=1.0, forward_only=False, images_seqlens=None
    )
    return reduce_metrics(rename_dict(dict(tu.get(done, "metrics")), "actor/"))


def _batch(t: dict[str, Any], **further: Any) -> Any:
    from tensordict import TensorDict
    from verl.protocol import DataProto

    fields = {
        "rollout_log_probs": t["rollout"],
        "old_log_probs": t["trained"],
        "response_mask": t["mask"],
        "responses": t["tokens"],
        **further,
    }
    return DataProto(batch=TensorDict(fields, batch_size=len(t["lengths"])))


def _recomputed(config: Any, t: dict[str, Any], actor: Any) -> dict[str, Any]:
    """What the trainer logs where it computes the old log-probs itself."""
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.utils.debug.metrics import calculate_debug_metrics

    entropy = agg_loss(loss_mat=t["entropy"], loss_mask=t["mask"], loss_agg_mode=actor.loss_agg_mode)
    _, corrected = compute_rollout_correction_and_add_to_batch(_batch(t), config.algorithm.rollout_correction)
    return {"actor/entropy": entropy, **calculate_debug_metrics(_batch(t)), **corrected}


def _step(config: Any, t: dict[str, Any]) -> dict[str, Any]:
    """What the trainer logs at the end of every step."""
    import torch
    from verl.trainer.ppo import metric_utils

    scores = torch.zeros_like(t["rollout"])
    scores[torch.arange(len(scores)), t["lengths"] - 1] = t["rewards"]
    batch = _batch(
        t,
        prompts=torch.zeros(len(scores), 2, dtype=torch.long),
        token_level_scores=scores,
        token_level_rewards=scores,
        advantages=t["advantages"],
        returns=t["advantages"],
        prompt_length=torch.full((len(scores),), 2.0),
        response_length=t["lengths"].float(),
        routed_experts=t["choices"],
    )
    batch.meta_info["global_token_num"] = (t["lengths"] + 2).tolist()
    interval = config.actor_rollout_ref.rollout.moe_load_balance_metrics_interval
    counter = metric_utils.RolloutMoELoadBalanceMetricsAccumulator(model_config=config.actor_rollout_ref.model)
    return {
        **metric_utils.compute_data_metrics(batch, use_critic=False),
        **metric_utils.compute_moe_lb_metrics(batch, interval, 1, counter),
        **metric_utils.compute_throughout_metrics(batch, {"step": 2.5}, n_gpus=1),
    }


if __name__ == "__main__":
    work(Path(sys.argv[1]))
