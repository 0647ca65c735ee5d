"""Which of verl's metrics is which canonical signal, and why some signals have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moeproxy.lab.verl_job import VERL, VerlJob
from moeproxy.traces.signals import SIGNALS

_COMMON = {
    "policy_loss": ("actor/pg_loss", ""),
    "total_loss": ("actor/loss", "the loss that is differentiated: policy loss plus coefficient times KL"),
    "grad_norm": ("actor/grad_norm", "before clipping; verl leaves out a step whose norm is not finite"),
    "reward_mean": ("critic/score/mean", "raw rewards, responses without any token left out"),
    "response_length": ("response_length/mean", ""),
    "seconds_per_step": ("perf/time_per_step", ""),
}
_KL = ("actor/kl_loss", "k3 estimate against the reference policy, before its coefficient")
_LOAD = (
    "rollout/moe/max_vio/layer_{layer}",
    "the rollout engine's choices for response tokens (the lab counts the trainer's, prompts included); layers are "
    "numbered as the rollout engine reports them, and a layer without experts shows a load that means nothing",
)
_BYPASS = {
    "entropy": ("actor/entropy_loss", "entropy of the policy in the update, per token; its coefficient is 0"),
    "logprob_diff_k1": ("actor/rollout_corr/kl", "mean over micro-batches of their token means"),
    "logprob_diff_k3": ("actor/rollout_corr/k3_kl", "mean over micro-batches of their token means"),
}
_RECOMPUTED = {
    "entropy": ("actor/entropy", ""),
    "logprob_diff_k1": ("rollout_corr/kl", ""),
    "logprob_diff_k3": ("rollout_corr/k3_kl", ""),
    "prob_pearson": ("training/rollout_actor_probs_pearson_corr", ""),
}
_NOT_LOGGED = "verl does not log it"
_FROM_RESPONSES = "verl does not log it; the dumped responses hold the score of each sample and its group (uid)"
_PROBABILITIES = (
    "verl does not log it: training/rollout_probs_diff_* are differences of probabilities, and "
    "rollout_corr/log_ppl_abs_diff is a mean over responses, not tokens"
)
_CLIPPED = "verl logs both bounds in one: actor/pg_clipfrac is clip_fraction_low + clip_fraction_high"
_MISSING = {
    "aux_loss": "the FSDP engine differentiates no load-balancing loss",
    "reward_std": _FROM_RESPONSES,
    "zero_variance_groups": _FROM_RESPONSES,
    "truncated": "response_length/clip_ratio compares with the longest response of the step, not with the limit",
    "clip_fraction_low": _CLIPPED,
    "clip_fraction_high": _CLIPPED,
    "logprob_diff_mean": _PROBABILITIES,
    "logprob_diff_max": _PROBABILITIES,
    "prob_pearson": "verl logs it only where it recomputes the old log-probs (old_log_probs='trainer')",
    "kl": "no reference policy at beta 0",
    "router_max_violation": "the job was written with router_load off",
}


def verl_signals(job: VerlJob) -> dict[str, tuple[str, str]]:
    """Return canonical signal -> (verl's metric, note) for what a job logs.

    The per-layer signal's metric holds `{layer}`. All are in the unit of `moeproxy.traces.SIGNALS`.
    """
    found = {**_COMMON, **(_BYPASS if job.old_log_probs == "rollout" else _RECOMPUTED)}
    if job.settings.beta > 0:
        found["kl"] = _KL
    if job.router_load:
        found["router_max_violation"] = _LOAD
    return {name: found[name] for name in SIGNALS if name in found}


def log_keys(job: VerlJob, log: Path) -> dict[str, Any]:
    """Return what a reader of verl's log must know, as JSON values: the layout, the metric of every signal, the gaps.

    Args:
        job: what was run.
        log: the JSON-lines file.
    """
    signals = verl_signals(job)
    return {
        "framework": f"verl {VERL}",
        "log": str(log),
        "line": {"step": "step", "values": "data"},
        "null": "the value was not finite; a metric that is absent was not logged",
        "signals": {
            name: {"key": key, "factor": 1.0, "unit": SIGNALS[name].unit, "per_layer": "{layer}" in key, "note": note}
            for name, (key, note) in signals.items()
        },
        "missing": {name: _MISSING.get(name, _NOT_LOGGED) for name in SIGNALS if name not in signals},
    }
