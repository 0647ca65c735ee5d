"""verl: console lines, the file logger, TensorBoard and wandb use the same keys."""

from __future__ import annotations

from moeproxy.traces.keys.base import Framework, Key

_BATCHES = "mean over the update's micro-batches"
_PROBS = "of probabilities, not of log-probs, whatever verl's docstring says"

VERL = Framework(
    name="verl",
    keys=(
        Key("actor/loss", "total_loss", _BATCHES),
        Key("actor/pg_loss", "policy_loss", _BATCHES),
        Key("actor/grad_norm", "grad_norm", "mean over the step's updates"),
        Key("actor/lr", "learning_rate"),
        Key("actor/lr(1e-4)", "learning_rate", divisor=1e4),
        Key("critic/score/mean", "reward_mean"),
        Key("critic/rewards/mean", "shaped_reward_mean"),
        Key("critic/vf_loss", "value_loss", _BATCHES),
        Key("actor/entropy", "entropy"),
        Key("actor/entropy_loss", "entropy", _BATCHES),
        Key("actor/kl_loss", "kl", f"{_BATCHES}; the estimate that kl_loss_type names"),
        Key("actor/reward_kl_penalty", "kl", "the estimate that the reward's penalty uses, mean over sequences"),
        Key("critic/kl", "kl", "the estimate that the reward's penalty uses, mean over sequences"),
        Key("actor/ppo_kl", "kl_old", "k1 estimate"),
        Key("actor/pg_clipfrac", "clip_fraction", "without the dual clip"),
        Key("actor/pg_clipfrac_lower", "clip_fraction_low", "share clipped by the dual clip, of negative advantages"),
        Key("response_length/mean", "response_length"),
        Key("response_length/max", "response_length_max"),
        Key("response_length/min", "response_length_min"),
        Key("response_length/clip_ratio", "truncated", "share of responses as long as the longest possible"),
        Key("rollout_corr/kl", "logprob_diff_k1"),
        Key("rollout_corr/k3_kl", "logprob_diff_k3"),
        Key("rollout_corr/log_ppl_abs_diff", "sequence_logprob_diff"),
        Key("rollout_corr/rollout_is_mean", "is_ratio_mean", "after truncation"),
        Key("rollout_corr/rollout_is_max", "is_ratio_max"),
        Key("rollout_corr/rollout_is_min", "is_ratio_min"),
        Key("training/rollout_probs_diff_mean", "prob_diff_mean", _PROBS),
        Key("training/rollout_probs_diff_max", "prob_diff_max", _PROBS),
        Key("training/rollout_probs_diff_std", "prob_diff_std", _PROBS),
        Key("training/rollout_actor_probs_pearson_corr", "prob_pearson"),
        Key("training/off_policy/trajectory_staleness/mean", "staleness"),
        Key("timing_s/step", "seconds_per_step"),
    ),
    steps=("step", "training/global_step"),
    marks=(
        "actor/*",
        "critic/*",
        "response_length/*",
        "rollout_corr/*",
        "timing_s/*",
        "perf/mfu/*",
        "training/*",
        "val-core/*",
        "global_seqlen/*",
        "prompt_length/*",
    ),
    hints=("step:- line", "verl file logger"),
    console_notes=("old releases print 3 decimals: a learning rate of 1e-6 stands there as 0",),
)
