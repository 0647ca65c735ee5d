"""MR: faults of the mixture's routing."""

from __future__ import annotations

from dataclasses import replace

import torch

from moeproxy.lab.faults.chance import generator
from moeproxy.lab.faults.fault import Fault, Seam, TellTale
from moeproxy.lab.seams import Coefficients, Named, Routing


def _rerouted(healthy: Seam, strength: float) -> Seam:
    def routing(before: Routing, *, step: int) -> Routing:
        passed = healthy(before, step=step)
        free_TE = passed.logits_TE.scatter(-1, passed.index_TK, -torch.inf)
        runner_up_T = free_TE.argmax(dim=-1)
        draw_T = torch.rand(len(runner_up_T), generator=generator(step, salt=23 + passed.layer))
        index_TK = passed.index_TK.clone()
        weakest_T = passed.weights_TK.argmin(dim=-1)
        hit_T = (draw_T < strength).nonzero().squeeze(-1)
        index_TK[hit_T, weakest_T[hit_T]] = runner_up_T[hit_T]
        return replace(passed, index_TK=index_TK)

    return routing


def _balance(sign: float, size: float):
    def act(healthy: Seam, strength: float) -> Seam:
        def coefficients(before: Coefficients, *, step: int) -> Coefficients:
            passed = healthy(before, step=step)
            return replace(passed, balance=passed.balance + sign * size * strength)

        return coefficients

    return act


def _router_gradients(healthy: Seam, strength: float) -> Seam:
    def gradients(named: Named, *, step: int) -> None:
        healthy(named, step=step)
        for name, parameter in named:
            if {"gate", "router"} & set(name.split(".")) and parameter.grad is not None:
                parameter.grad.mul_(1 - strength)

    return gradients


FAULTS = (
    Fault(
        id="routing_mismatch",
        family="MR",
        title="Engines route differently",
        seam="routing",
        what="For each token and layer, with probability s, the rollout engine replaces the expert of lowest weight by "
        "the runner-up, with the same weight.",
        tell_tales=(TellTale("logprob_diff_mean", +1), TellTale("logprob_diff_max", +1)),
        twin="Megatron-LM#4168, NeMo-RL#2590, arXiv 2510.11370",
        check="Record the chosen experts of both engines for the same tokens and count differing choices.",
        remedy="Replay the rollout's routing in the trainer.",
        act=_rerouted,
        needs_experts=True,
    ),
    Fault(
        id="aux_loss_interference",
        family="MR",
        title="Auxiliary loss interferes",
        seam="coefficients",
        what="A load-balancing loss over all tokens with weight 1.0 s enters the objective beside the policy loss.",
        tell_tales=(TellTale("grad_norm_router", +1), TellTale("total_loss", +1)),
        twin="Megatron-LM#5694 (inherited router_aux_loss_coef, gradient norm 3.4 times the reference)",
        check="Set the coefficient to zero: router gradients fall to those of the policy loss.",
        remedy="Switch the auxiliary loss off in RL, or lower its coefficient.",
        act=_balance(+1, 1.0),
        needs_experts=True,
    ),
    Fault(
        id="expert_collapse",
        family="MR",
        title="Expert collapse",
        seam="coefficients",
        what="The load-balancing loss has the wrong sign, with weight 1.0 s: routers are rewarded for sending tokens "
        "to few experts.",
        tell_tales=(TellTale("router_load_entropy", -1), TellTale("router_max_violation", +1)),
        twin="verl#4103, arXiv 2601.17111 (skewed routing)",
        check="Plot the load of every expert over steps; look at the sign of the balancing term.",
        remedy="Correct the sign; restart from before the onset, since lost experts do not come back.",
        act=_balance(-1, 1.0),
        needs_experts=True,
    ),
    Fault(
        id="router_frozen",
        family="MR",
        title="Routers get no gradient",
        seam="gradients",
        what="Gradients of routers are 1 - s times what they should be; at strength 1 routers never change.",
        tell_tales=(TellTale("grad_norm_router", -1),),
        twin="Megatron-LM#79 of ISEEKYAN (replay gives drifted experts zero gradient)",
        check="Read the router's gradient norm by layer: zero.",
        remedy="Gather gate weights from dense scores, so that gradients reach every chosen expert.",
        act=_router_gradients,
        needs_experts=True,
    ),
)
