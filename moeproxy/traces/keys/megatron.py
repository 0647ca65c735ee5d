"""Megatron-LM: console lines between bars, golden values, TensorBoard."""

from __future__ import annotations

from moeproxy.traces.keys.base import Framework, Key

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
        Key("loss", "total_loss", "whatever the program calls its loss"),
        Key("train_loss", "total_loss", "whatever the program calls its loss"),
        Key("grad_norm", "grad_norm", "clipped or not is not known"),
        Key("lr", "learning_rate"),
        Key("learning_rate", "learning_rate"),
        Key("reward", "reward_mean", "whatever the program calls its reward"),
        Key("reward_mean", "reward_mean", "whatever the program calls its reward"),
        Key("entropy", "entropy", "averaging is not known"),
        Key("kl", "kl", "against which policy is not known"),
        Key("response_length", "response_length", "averaging is not known"),
    ),
    steps=("step", "Step", "_step", "global_step", "iteration", "iter", "train/step", "train/global_step"),
    prefixes=("", "train/"),
)
"""For logs of programs that are not known: names that hardly mean anything else, each with a warning."""
