"""Remedies in gradients and the optimizer's step.

Gradients are measured between the two seams: what is done to them at the second shows in what follows, not in the
logged norms, so no remedy looks well by hiding what it should mend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from moeproxy.lab.probes import module_of
from moeproxy.lab.remedies.treatment import Act, Seam, Treatment, always
from moeproxy.lab.seams import Named, Update
from moeproxy.lab.settings import GRPOSettings

_RATE = 0.1
_NORM = 0.1
_SMALLEST_SCALE = 2.0**-40


def _parameters(update: Update) -> list[nn.Parameter]:
    return [p for group in update.optimizer.param_groups for p in group["params"] if p.grad is not None]


def _last_before(prepare: Callable[[Update], bool]) -> Act:
    """An act that looks at the update right before it is applied; `prepare` says whether it shall be."""

    def act(seam: Seam) -> Seam:
        def optimizer_step(update: Update, *, step: int) -> None:
            seam(Update(lambda: update.apply() if prepare(update) else None, update.optimizer), step=step)

        return optimizer_step

    return act


def _slower(seam: Seam) -> Seam:
    def optimizer_step(update: Update, *, step: int) -> None:
        groups = update.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group in groups:
                group["lr"] *= _RATE
            seam(update, step=step)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    return optimizer_step


def _clip(update: Update) -> bool:
    nn.utils.clip_grad_norm_(_parameters(update), _NORM)
    return True


def _finite(update: Update) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in _parameters(update) if p.grad is not None)


def _drop_not_finite(update: Update) -> bool:
    for parameter in _parameters(update):
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return True


def _without_routers(settings: GRPOSettings) -> Mapping[str, Act]:
    routers: set[int] = set()

    def note(seam: Seam) -> Seam:
        def gradients(named: Named, *, step: int) -> None:
            seam(named, step=step)
            routers.update(id(parameter) for name, parameter in named if module_of(name) == "router")

        return gradients

    def freeze(update: Update) -> bool:
        for parameter in _parameters(update):
            if id(parameter) in routers:
                parameter.grad = None
        return True

    return {"gradients": note, "optimizer_step": _last_before(freeze)}


def _reset_once(settings: GRPOSettings) -> Mapping[str, Act]:
    done: list[bool] = []

    def reset(update: Update) -> bool:
        if not done:
            done.append(True)
            update.optimizer.state.clear()
        return True

    return {"optimizer_step": _last_before(reset)}


def _state_kept(settings: GRPOSettings) -> Mapping[str, Act]:
    kept: dict[Any, Any] = {}

    def act(seam: Seam) -> Seam:
        def optimizer_step(update: Update, *, step: int) -> None:
            kept.update(update.optimizer.state)

            def apply() -> None:
                lost = {key: state for key, state in kept.items() if key not in update.optimizer.state}
                update.optimizer.state.update(lost)
                update.apply()

            seam(Update(apply, update.optimizer), step=step)

        return optimizer_step

    return {"optimizer_step": act}


def _verified(seam: Seam) -> Seam:
    def optimizer_step(update: Update, *, step: int) -> None:
        applied: list[bool] = []

        def apply() -> None:
            applied.append(True)
            update.apply()

        seam(Update(apply, update.optimizer), step=step)
        if not applied:
            update()

    return optimizer_step


def _dynamic_scale(settings: GRPOSettings) -> Mapping[str, Act]:
    scale = [1.0]

    def act(seam: Seam) -> Seam:
        def gradients(named: Named, *, step: int) -> None:
            exact = [(p, p.grad.clone()) for _, p in named if p.grad is not None]
            while True:
                for parameter, grad in exact:
                    parameter.grad = grad * scale[0]
                seam(named, step=step)
                finite = all(bool(p.grad.isfinite().all()) for p, _ in exact if p.grad is not None)
                if finite or scale[0] <= _SMALLEST_SCALE:
                    break
                scale[0] /= 2
            for parameter, _ in exact:
                if parameter.grad is not None:
                    parameter.grad.div_(scale[0])

        return gradients

    return {"gradients": act}


def _kept_exact(chosen: Callable[[str], bool]) -> Act:
    """An act after which the gradients of the chosen parameters are what the backward pass gave."""

    def act(seam: Seam) -> Seam:
        def gradients(named: Named, *, step: int) -> None:
            exact = [(p, p.grad.clone()) for name, p in named if p.grad is not None and chosen(name)]
            seam(named, step=step)
            for parameter, grad in exact:
                parameter.grad = grad

        return gradients

    return act


def _entry(kind: Any, id: str, title: str, what: str, source: str, plan: Any, *seams: str, **more: Any) -> Treatment:
    return Treatment(id, kind, title, what, source, seams or ("optimizer_step",), plan, **more)


def _at_step(act: Act) -> Any:
    return always(act, "optimizer_step")


REMEDIES = (
    _entry(
        "mitigation",
        "lower_rate",
        "A lower learning rate",
        f"The learning rate is {_RATE:g} times what is configured.",
        "Search-R1#88, trl#2980",
        _at_step(_slower),
    ),
    _entry(
        "mitigation",
        "clip_gradients",
        "Gradients clipped harder",
        f"The norm of all gradients is cut to {_NORM:g} before the update.",
        "every framework's max_grad_norm",
        _at_step(_last_before(_clip)),
    ),
    _entry(
        "mitigation",
        "finite_gate",
        "Updates that are not finite left out",
        "Right before the optimizer's step gradients are checked; a step with one that is not finite is left out.",
        "verl-omni#539, miles#2078",
        _at_step(_last_before(_finite)),
    ),
    _entry(
        "mitigation",
        "zero_not_finite",
        "Gradients that are not finite set to zero",
        "Right before the optimizer's step every element of a gradient that is not finite becomes 0.",
        "torch.nan_to_num on gradients; see miles#2078",
        _at_step(_last_before(_drop_not_finite)),
    ),
    _entry(
        "mitigation",
        "dynamic_loss_scale",
        "A loss scale that backs off",
        "While gradients overflow, the loss is scaled by half as much, and gradients are scaled back afterwards.",
        "torch.amp.GradScaler (backoff 0.5; it grows again after 2000 steps, which is longer than runs here)",
        _dynamic_scale,
        "gradients",
    ),
    _entry(
        "repair",
        "full_precision_gradients",
        "Gradients without float16",
        "Gradients stay in the trainer's own dtype.",
        "LlamaFactory#8514 (bfloat16)",
        always(_kept_exact(lambda name: True), "gradients"),
        "gradients",
    ),
    _entry(
        "repair",
        "right_group_size",
        "Expert gradients divided by the right group",
        "Gradients of experts are the mean over the ranks that they were summed over.",
        "DeepSpeed#6546",
        always(_kept_exact(lambda name: module_of(name) == "experts"), "gradients"),
        "gradients",
        needs_experts=True,
    ),
    _entry(
        "repair",
        "dense_router_gradients",
        "Router gradients from dense scores",
        "Routers get the gradients that the backward pass gives them.",
        "Megatron-LM#79 of ISEEKYAN",
        always(_kept_exact(lambda name: module_of(name) == "router"), "gradients"),
        "gradients",
        needs_experts=True,
    ),
    _entry(
        "mitigation",
        "freeze_routers",
        "Routers frozen",
        "Routers are not updated.",
        "common practice in fine-tuning Mixture-of-Experts models",
        _without_routers,
        "gradients",
        "optimizer_step",
        needs_experts=True,
    ),
    _entry(
        "mitigation",
        "keep_optimizer_state",
        "Optimizer state kept and put back",
        "A copy of the optimizer's state is kept; what has been lost by the time of the update is put back.",
        "prime-rl#3561, Megatron-LM#1842",
        _state_kept,
    ),
    _entry(
        "mitigation",
        "reset_optimizer",
        "Optimizer state reset",
        "The optimizer's state is emptied once.",
        "Megatron-LM#1842 (--no-load-optim)",
        _reset_once,
    ),
    _entry(
        "repair",
        "verified_update",
        "Update verified",
        "A step after which no update was applied makes it up.",
        "trl#5312, ms-swift#5571",
        _at_step(_verified),
    ),
)
