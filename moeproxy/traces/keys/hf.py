"""Transformers' Trainer, TRL, ms-swift and LLaMA-Factory: one family, since they share the Trainer's log."""

from __future__ import annotations

from moeproxy.traces.keys.base import Framework, Key

_WINDOW = "mean over the steps since the last log (transformers 4 rounds to 4 decimals)"
_LAST = "of the last step before the log"
_LOGGED = "mean over the batches since the last log"
_TRUNCATED = "after truncation at the cap; of sequences where the correction is per sequence"
_FILTER = "the Trainer writes a loss that is not finite as 0 or as the mean of the others (logging_nan_inf_filter)"

_TRAINER = (
    Key("loss", "total_loss", _WINDOW),
    Key("grad_norm", "grad_norm", _LAST),
    Key("learning_rate", "learning_rate"),
)
_GRPO = (
    Key("reward", "reward_mean", _LOGGED),
    Key("reward_std", "reward_std", f"{_LOGGED}; of the whole batch where rewards are scaled by it"),
    Key("frac_reward_zero_std", "zero_variance_groups", _LOGGED),
    Key("kl", "kl", f"{_LOGGED}; k3 estimate"),
    Key("clip_ratio/region_mean", "clip_fraction", _LOGGED),
    Key("clip_ratio", "clip_fraction", _LOGGED),
    Key("clip_ratio/low_mean", "clip_fraction_low", _LOGGED),
    Key("clip_ratio/high_mean", "clip_fraction_high", _LOGGED),
    Key("completions/mean_length", "response_length", _LOGGED),
    Key("completion_length", "response_length", _LOGGED),
    Key("completions/max_length", "response_length_max", _LOGGED),
    Key("completions/min_length", "response_length_min", _LOGGED),
    Key("completions/clipped_ratio", "truncated", _LOGGED),
    Key("aux_loss", "aux_loss", _LOGGED),
)
_SAMPLING = (
    Key("policy_loss", "policy_loss", _LOGGED),
    Key("entropy", "entropy", _LOGGED),
    Key("sampling/sampling_logp_difference/mean", "logprob_diff_mean", _LOGGED),
    Key("sampling/sampling_logp_difference/max", "logprob_diff_max", "mean over batches of the largest"),
    Key("sampling/importance_sampling_ratio/mean", "is_ratio_mean", _TRUNCATED),
    Key("sampling/importance_sampling_ratio/max", "is_ratio_max", _TRUNCATED),
    Key("sampling/importance_sampling_ratio/min", "is_ratio_min", _TRUNCATED),
    Key("step_time", "seconds_per_step", _LOGGED),
)

HF = Framework(
    name="transformers",
    keys=_TRAINER,
    steps=("step", "train/global_step", "global_step"),
    marks=(
        "train_runtime",
        "eval_runtime",
        "epoch&learning_rate&loss",
        "train/epoch&train/loss",
        "train/epoch&train/global_step",
    ),
    hints=("trainer state",),
    prefixes=("", "train/"),
    ordinal="loss",
    hides_nan=("loss", "grad_norm"),
    notes=(_FILTER,),
)

TRL = Framework(
    name="trl",
    keys=(*_TRAINER, *_GRPO, *_SAMPLING),
    steps=("step", "train/global_step", "global_step"),
    marks=(
        "*completions/*",
        "*completion_length",
        "*frac_reward_zero_std",
        "*rewards/*",
        "*sampling/*",
        "*reward_std",
    ),
    hints=("trainer state",),
    prefixes=("", "train/"),
    ordinal="loss",
    hides_nan=("loss", "grad_norm"),
    notes=(_FILTER,),
)

SWIFT = Framework(
    name="ms-swift",
    keys=(
        *_TRAINER,
        *_GRPO,
        Key("entropy/mean", "entropy", _LOGGED),
        Key("rollout_correction/kl", "logprob_diff_k1", "KL(rollout || training) by k1"),
        Key("rollout_correction/k3_kl", "logprob_diff_k3"),
        Key("rollout_correction/log_ppl_abs_diff", "sequence_logprob_diff"),
        Key("rollout_correction/is_weight_mean", "is_ratio_mean", "after truncation"),
        Key("load_balancing_loss", "aux_loss", "after its coefficient, mean over layers"),
        Key("z_loss", "z_loss"),
    ),
    steps=("global_step/max_steps", "iteration", "global_step", "step"),
    marks=(
        "*global_step/max_steps",
        "*train_speed(*",
        "*elapsed_time",
        "*remaining_time",
        "*memory(GiB)",
        "*rollout_correction/*",
        "*entropy/mean",
    ),
    hints=("logging.jsonl",),
    prefixes=("", "train/"),
    hides_nan=("loss", "grad_norm"),
    notes=(_FILTER, "logging.jsonl holds 8 decimals: a learning rate below 5e-9 stands there as 0"),
)

LLAMA_FACTORY = Framework(
    name="llama-factory",
    keys=(
        Key("loss", "total_loss", _WINDOW),
        Key("lr", "learning_rate"),
        Key("learning_rate", "learning_rate"),
        Key("reward", "reward_mean", _LOGGED),
        Key("grad_norm", "grad_norm", _LAST),
    ),
    steps=("current_steps",),
    marks=("current_steps", "total_steps", "percentage"),
    hides_nan=("loss", "grad_norm"),
    notes=(_FILTER,),
)
