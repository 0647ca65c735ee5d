"""Megatron-LM: console lines between bars, golden values, TensorBoard."""

from __future__ import annotations

from moeproxy.traces.keys.base import ANY_LOSS, ANY_MEAN, ANY_NORM, ANY_POLICY, ANY_REWARD, Framework, Key

_INTERVAL = "mean over the log interval"

MEGATRON = Framework(
    name="megatron-lm",
    keys=(
        Key("lm loss", "lm_loss", _INTERVAL),
        Key("loss", "lm_loss", _INTERVAL),
        Key("grad norm", "grad_norm", "of the interval's last step"),
        Key("grad-norm", "grad_norm"),
        Key("learning rate", "learning_rate"),
        Key("learning-rate", "learning_rate"),
        Key("load_balancing_loss", "aux_loss", "mean over layers, after its coefficient"),
        Key("z_loss", "z_loss", "mean over layers, after its coefficient"),
        Key("mtp_1 loss", "mtp_loss", _INTERVAL),
        Key("number of skipped iterations", "skipped_updates", "in the log interval"),
        Key("number of nan iterations", "nan_updates", "in the log interval"),
        Key("elapsed time per iteration (ms)", "seconds_per_step", _INTERVAL, 1e3),
        Key("iteration-time", "seconds_per_step"),
    ),
    steps=("iteration", "step"),
    marks=(
        "lm loss*",
        "grad norm",
        "grad-norm*",
        "num-zeros",
        "consumed samples",
        "mem-*",
        "number of nan iterations",
        "loss scale",
        "iteration-time",
        "total iterations",
    ),
    hints=("| line", "golden values"),
)

GENERIC = Framework(
    name="unknown",
    keys=(
        Key("loss", "total_loss", ANY_LOSS),
        Key("train_loss", "total_loss", ANY_LOSS),
        Key("grad_norm", "grad_norm", ANY_NORM),
        Key("lr", "learning_rate"),
        Key("learning_rate", "learning_rate"),
        Key("reward", "reward_mean", ANY_REWARD),
        Key("reward_mean", "reward_mean", ANY_REWARD),
        Key("entropy", "entropy", ANY_MEAN),
        Key("kl", "kl", ANY_POLICY),
        Key("response_length", "response_length", ANY_MEAN),
    ),
    steps=("step", "Step", "_step", "global_step", "iteration", "iter", "train/step", "train/global_step"),
    prefixes=("", "train/"),
)
"""For logs of programs that are not known: names that hardly mean anything else, each with a warning."""
