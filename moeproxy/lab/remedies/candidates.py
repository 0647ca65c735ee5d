"""Which remedies belong to which fault, the most likely first.

Mitigations that people used against the fault's public twin come first, then what is known to help its relatives, then
the repair of the part that the diagnosis names.
"""

from __future__ import annotations

_MISMATCH = "tis icepop recomputed_logprobs"

_BY_FAULT = {
    "rollout_logp_precision": f"{_MISMATCH} reference_attention",
    "gradient_overflow": "dynamic_loss_scale full_precision_gradients",
    "nan_poison": "finite_gate zero_not_finite",
    "lm_head_precision": f"{_MISMATCH} fp32_head",
    "router_precision": f"routing_replay {_MISMATCH} fp32_router",
    "stale_rollout": f"resync {_MISMATCH}",
    "weight_conversion_wrong": f"{_MISMATCH} resync reconvert",
    "position_shift": f"{_MISMATCH} reference_positions",
    "loss_mask_wrong": "lower_rate rebuild_mask",
    "grad_scale_constant": "clip_gradients reset_optimizer lower_rate right_group_size",
    "sampling_semantics": f"{_MISMATCH} plain_sampling",
    "optimizer_state_lost": "keep_optimizer_state lower_rate",
    "kl_sign": "kl_off stronger_kl lower_rate correct_signs",
    "topk_norm_missing": f"{_MISMATCH} reference_experts",
    "expert_offset": f"routing_replay {_MISMATCH} resync reference_experts",
    "attention_tail": f"{_MISMATCH} reference_attention",
    "routing_mismatch": f"routing_replay {_MISMATCH} reference_experts",
    "aux_loss_interference": "balance_off freeze_routers lower_rate",
    "expert_collapse": "balance_off freeze_routers correct_signs",
    "router_frozen": "reset_optimizer dense_router_gradients",
    "reward_spike": "drop_outlier_rewards clip_rewards rescore",
    "reward_collapse": "restart rescore",
    "reward_hacking": "stronger_kl lower_rate rescore",
    "empty_response": "min_tokens plain_sampling",
    "repetition_collapse": "no_repeat icepop plain_sampling",
    "response_too_short": "min_tokens icepop plain_sampling",
    "response_too_long": "raise_cap mask_truncated icepop plain_sampling",
    "kl_explosion": "lower_rate stronger_kl clip_gradients",
    "update_freeze": "reset_optimizer verified_update",
    "entropy_collapse": "entropy_off entropy_bonus stronger_kl correct_signs",
    "value_mismatch": "centre_advantages clip_advantages regroup",
    "advantage_instability": "clip_advantages centre_advantages lower_rate regroup",
    "delayed_credit": "lower_rate regroup",
    "tool_call_error": "retry_calls mask_bad_turns local_tool",
    "observation_corruption": "mask_bad_turns local_tool",
    "termination_error": "mask_bad_turns continue_episodes",
}

CANDIDATES: dict[str, tuple[str, ...]] = {fault: tuple(names.split()) for fault, names in _BY_FAULT.items()}
"""Ids of remedies by id of the fault."""
