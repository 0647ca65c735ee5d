"""Observers of families with experts modules of their own, against brute force on tiny models of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moeproxy.experts.batches import without_head, zeros
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.observe import NO_EXPERT, LayerTotals
from moeproxy.experts.profile import profile, run, tokenise
from moeproxy.experts.statistics import ExpertProfile
from tests import tiny
from tests.families import configs
from tests.families.saved import write

TEXTS = [[3, 14, 15, 9, 26, 5], [35, 8, 9], [7, 9, 3, 23]]

# One token's (expert or None, gate weight, output before gating, how much of the output the layer adds) for each slot.
Slots = list[tuple[int | None, float, Tensor | None, float]]


def _glu(hidden: Tensor, gate_up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = (gate_up @ hidden).chunk(2)
    return down @ (act(gate) * up)


def dbrx(block: Any, hidden: Tensor) -> Slots:
    p = block.router.layer.weight.mv(hidden).softmax(0)
    top = p.topk(block.top_k)
    weights = top.values / top.values.norm(p=block.moe_normalize_expert_weights)
    w1, v1, w2 = (x.view(configs.EXPERTS, -1, configs.WIDTH) for x in block.experts.mlp.parameters())
    act = block.experts.mlp.activation_fn
    found = zip(top.indices.tolist(), weights.tolist(), strict=True)
    return [(e, w, w2[e].T @ (act(w1[e] @ hidden) * (v1[e] @ hidden)), w) for e, w in found]


def jetmoe(block: Any, hidden: Tensor) -> Slots:
    top = block.router.layer.weight.mv(hidden).topk(block.router.top_k)
    found = zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True)
    gate_up, down = block.input_linear.weight, block.output_linear.weight
    return [(e, w, _glu(hidden, gate_up[e], down[e], block.activation), w) for e, w in found]


def llama4(block: Any, hidden: Tensor) -> Slots:
    top = block.router.weight.mv(hidden).topk(block.top_k)
    experts = block.experts
    found = zip(top.indices.tolist(), top.values.sigmoid().tolist(), strict=True)
    outputs = [
        (e, w, _glu(w * hidden, experts.gate_up_proj[e].T, experts.down_proj[e].T, experts.act_fn)) for e, w in found
    ]
    return [(e, w, out, 1.0) for e, w, out in outputs]


def longcat_flash(block: Any, hidden: Tensor) -> Slots:
    p = block.router.classifier.weight.mv(hidden).softmax(0)
    chosen = (p + block.router.e_score_correction_bias).topk(block.router.top_k).indices.tolist()
    experts, slots = block.experts, []
    for e in chosen:
        weight = float(p[e]) * block.router.routed_scaling_factor
        if e >= configs.EXPERTS:
            slots.append((None, 0.0, None, 0.0))
        else:
            slots.append(
                (e, weight, _glu(hidden, experts.gate_up_proj[e], experts.down_proj[e], experts.act_fn), weight)
            )
    return slots


def zaya(block: Any, hidden: Tensor) -> Slots:
    # The router's state comes from the layer before, so its choice is taken from the router itself.
    e, weight = block.choice
    if e == configs.EXPERTS:
        return [(None, 0.0, None, 0.0)]
    experts = block.experts
    return [(e, weight, _glu(hidden, experts.gate_up_proj[e], experts.down_proj[e], experts.act_fn), weight)]


FAMILIES = {"dbrx": dbrx, "jetmoe": jetmoe, "llama4_text": llama4, "llama4": llama4, "longcat_flash": longcat_flash}
FAMILIES |= {"zaya": zaya}
ROUTED_AWAY = {"longcat_flash", "zaya"}


def skipping(model: Any, model_type: str) -> None:
    """Make ZAYA's router skip often (transformers resets this entry at loading)."""
    if model_type == "zaya":
        for layer in model.model.layers:
            biases = layer.mlp.gate.balancing_biases
            biases[-1] = biases[:-1].max()


def blocks_and_inputs(
    model: Any, checkpoint: Checkpoint
) -> dict[int, tuple[Any, list[Tensor], list[tuple[int, float]]]]:
    """By layer: MoE block, its inputs token by token from unpadded texts, and ZAYA's choices."""
    found: dict[int, tuple[Any, list[Tensor], list[tuple[int, float]]]] = {}
    handles = []
    for layer in checkpoint.moe_layers:
        block = model.get_submodule(checkpoint.family.block_in_memory(layer))
        found[layer] = (block, [], [])
        keep = found[layer][1]
        handles.append(
            block.register_forward_pre_hook(lambda m, args, keep=keep: keep.extend(args[0].flatten(0, -2).clone()))
        )
        if checkpoint.family.model_type == "zaya":
            handles.append(block.gate.register_forward_hook(_zaya_choice(found[layer][2])))
    with torch.no_grad():
        for text in TEXTS:
            without_head(model, checkpoint)(input_ids=torch.tensor([text]), use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def _zaya_choice(keep: list[tuple[int, float]]) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: tuple[Tensor, ...]) -> None:
        p = output[0].softmax(-1)
        chosen = (p + module.balancing_biases).argmax(-1)
        keep.extend(zip(chosen.tolist(), p.gather(1, chosen[:, None])[:, 0].tolist(), strict=True))

    return hook


def brute_force(model: Any, checkpoint: Checkpoint, layer: int, inputs: Any) -> dict[str, np.ndarray]:
    """The same statistics with written-out formulas."""
    block, hidden_TD, choices = inputs
    n = configs.EXPERTS
    sums = {name: np.zeros(n) for name in ("load_E", "gate_E", "saliency_E", "norm_E", "peak_E")}
    sums |= {"output_ED": np.zeros((n, configs.WIDTH)), "context_ED": np.zeros((n, configs.WIDTH))}
    sums |= {"cooccur_EE": np.zeros((n, n))}
    for number, hidden in enumerate(hidden_TD):
        if choices:
            block.choice = choices[number]
        slots = [slot for slot in FAMILIES[checkpoint.family.model_type](block, hidden) if slot[0] is not None]
        for e, weight, out, share in slots:
            sums["load_E"][e] += 1
            sums["gate_E"][e] += weight
            sums["norm_E"][e] += float(out.norm())
            sums["saliency_E"][e] += share * float(out.norm())
            sums["peak_E"][e] = max(sums["peak_E"][e], float(out.abs().max()))
            sums["output_ED"][e] += out.numpy()
            sums["context_ED"][e] += weight * hidden.numpy()
            for other, *_ in slots:
                sums["cooccur_EE"][e, other] += 1
    return sums


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def observed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Checkpoint, dict[int, LayerTotals]]:
    """A tiny model of each family and what the calibration pass saw."""
    checkpoint = write(tmp_path_factory.mktemp(request.param) / "m", request.param)
    model = load_model(checkpoint)
    skipping(model, request.param)
    totals = {layer: zeros(model, checkpoint, True, 2) for layer in checkpoint.moe_layers}
    run(model, checkpoint, totals, TEXTS, batch_size=2)
    return model, checkpoint, totals


def test_statistics_equal_a_brute_force_twin(observed: Any) -> None:
    model, checkpoint, totals = observed
    inputs = blocks_and_inputs(model, checkpoint)
    with torch.no_grad():
        for layer, sums in totals.items():
            twin = brute_force(model, checkpoint, layer, inputs[layer])
            for name, expected in twin.items():
                found = getattr(sums, name).numpy()
                scale = max(np.abs(expected).max(), 1)
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


def test_slots_without_an_expert_count_for_none(observed: Any) -> None:
    _, checkpoint, totals = observed
    n_tokens = sum(len(text) for text in TEXTS)
    away = 0
    for sums in totals.values():
        index_TK, weight_TK = torch.cat(sums.choices), torch.cat(sums.weights)
        assert index_TK.shape == (n_tokens, checkpoint.top_k)
        none = index_TK == NO_EXPERT
        away += int(none.sum())
        assert int(sums.load_E.sum()) == n_tokens * checkpoint.top_k - int(none.sum())
        assert (weight_TK[none] == 0).all()
        assert (weight_TK[~none] > 0).all()
        counted = torch.bincount(index_TK[~none].long(), minlength=checkpoint.n_experts)
        assert torch.equal(counted, sums.load_E)
        assert torch.equal(sums.cooccur_EE.diagonal(), sums.load_E)
        torch.testing.assert_close(sums.fold_gate_FE.sum(0), sums.gate_E, rtol=1e-5, atol=1e-6)
    assert (away > 0) == (checkpoint.family.model_type in ROUTED_AWAY)


def test_observing_changes_no_hidden_state(observed: Any) -> None:
    model, checkpoint, _ = observed
    ids = torch.tensor(TEXTS[:1])
    seen: list[Tensor] = []
    handle = without_head(model, checkpoint).register_forward_hook(
        lambda m, args, out: seen.append(out.last_hidden_state)
    )
    totals = {layer: zeros(model, checkpoint, False) for layer in checkpoint.moe_layers}
    run(model, checkpoint, totals, TEXTS[:1], 1)
    handle.remove()
    with torch.inference_mode():
        plain = without_head(model, checkpoint)(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(seen[0], plain, rtol=1e-5, atol=1e-5)
    if checkpoint.family.observer in ("gated_input", "sorted"):
        assert torch.equal(seen[0], plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_profile_of_the_whole_checkpoint_is_the_same_streamed(observed: Any, tmp_path: Path) -> None:
    _, checkpoint, _ = observed
    tiny.tokenizer().save_pretrained(checkpoint.path)
    one, other = (profile(checkpoint, tiny.TEXTS, batch_size=3, stream=how) for how in (False, True))
    assert one.n_tokens == other.n_tokens == len(one.tokens_T) == sum(map(len, tokenise(checkpoint, tiny.TEXTS)))
    np.testing.assert_array_equal(one.choices_TLK, other.choices_TLK)
    np.testing.assert_array_equal(one.router_LED, other.router_LED)
    np.testing.assert_allclose(one.output_LED, other.output_LED, rtol=0, atol=1e-5 * np.abs(one.output_LED).max())
    again = ExpertProfile.load(one.save(tmp_path / "p.npz"))
    np.testing.assert_array_equal(again.choices_TLK, one.choices_TLK)
    assert (one.choices_TLK == NO_EXPERT).sum() == one.n_tokens * one.top_k * len(one.moe_layers) - one.load_LE.sum()


def test_every_family_has_an_observer(tmp_path: Path) -> None:
    from moeproxy.experts.adapters import OBSERVERS
    from moeproxy.experts.families import FAMILIES as TABLE

    assert {row.observer for row in TABLE.values()} == set(OBSERVERS)
