"""Fidelity of a built proxy: known answers, and a brute-force twin of every measure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.profile import profile, tokenise
from moeproxy.proxy.build import Proxy, build
from moeproxy.proxy.cluster import allowed_counts, select
from moeproxy.proxy.fidelity import Fidelity, fidelity
from moeproxy.proxy.side_by_side import compare_outputs
from tests.families.saved import write
from tests.proxy.conftest import Case, texts
from tests.proxy.made_up import plan_for

TEXTS = texts(7, seed=5)


@pytest.fixture
def proxy(case: Case, tmp_path: Path) -> Proxy:
    """A proxy with the fewest experts the model allows but one step."""
    return build(case.checkpoint, select(case.profile, allowed_counts(case.profile)[1]), tmp_path / "p")


def test_a_proxy_with_all_experts_is_the_original(case: Case, tmp_path: Path) -> None:
    whole = build(case.checkpoint, select(case.profile, case.checkpoint.n_experts), tmp_path / "p")
    result = fidelity(case.checkpoint, whole, TEXTS)
    assert result.kl == pytest.approx(0, abs=1e-9)
    assert result.top1_agreement == 1
    assert result.perplexity == result.perplexity_proxy
    assert result.router_agreement == (1.0,) * len(case.checkpoint.moe_layers)
    assert result.hidden_cosine == pytest.approx([1] * len(case.checkpoint.moe_layers), abs=1e-6)
    assert result.score is None


def passes(checkpoint: Checkpoint) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], list[int]]]:
    """Logits (T, V), outputs of the decoder layers with experts (T, D) and token ids, one text at a time."""
    model = load_model(checkpoint)
    seen: list[torch.Tensor] = []
    for layer in checkpoint.moe_layers:
        model.model.layers[layer].register_forward_hook(lambda m, a, out: seen.append(out[0] if len(out) == 1 else out))
    for ids in tokenise(checkpoint, TEXTS):
        seen.clear()
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        yield logits.double(), [x.reshape(len(ids), -1).double() for x in seen], ids


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_equals_one_text_at_a_time_without_padding(case: Case, proxy: Proxy, batch_size: int) -> None:
    result = fidelity(case.checkpoint, proxy, TEXTS, batch_size=batch_size)
    n, nll, nll_proxy, kl, same, cosines = 0, 0.0, 0.0, 0.0, 0, []
    written = Checkpoint.open(proxy.path)
    for (one, hidden, ids), (two, other, _) in zip(passes(case.checkpoint), passes(written), strict=True):
        p, q = one.softmax(1)[:-1], two.softmax(1)[:-1]
        rows, following = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        nll -= float(p[rows, following].log().sum())
        nll_proxy -= float(q[rows, following].log().sum())
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(1) == q.argmax(1)).sum())
        n += len(ids) - 1
        cosines.append(torch.stack([torch.cosine_similarity(a, b) for a, b in zip(hidden, other, strict=True)]))
    assert result.n_tokens == n
    assert result.perplexity == pytest.approx(math.exp(nll / n), rel=1e-5)
    assert result.perplexity_proxy == pytest.approx(math.exp(nll_proxy / n), rel=1e-5)
    assert result.kl == pytest.approx(kl / n, rel=1e-3, abs=1e-6)
    assert result.kl > 1e-3, "the proxy must differ"
    assert result.top1_agreement == pytest.approx(same / n)
    assert result.hidden_cosine == pytest.approx(torch.cat(cosines, dim=1).mean(1).tolist(), abs=1e-5)
    assert max(result.hidden_cosine) < 1


@pytest.mark.parametrize("batch_size", [1, 4])
def test_prompts_are_not_predicted(case: Case, proxy: Proxy, batch_size: int) -> None:
    prompts = [text[:3] for text in TEXTS]
    prompts[0], prompts[1] = "", TEXTS[1]  # the whole text to predict, and nothing of it
    result = fidelity(case.checkpoint, proxy, TEXTS, prompts=prompts, batch_size=batch_size)
    n, nll, kl = 0, 0.0, 0.0
    pairs = zip(passes(case.checkpoint), passes(Checkpoint.open(proxy.path)), strict=True)
    for prompt, ((one, _, ids), (two, _, _)) in zip(prompts, pairs, strict=True):
        for place in range(max(1, len(prompt)), len(ids)):  # a character is a token
            p, q = one[place - 1].softmax(0), two[place - 1].softmax(0)
            nll -= float(p[ids[place]].log())
            kl += float((p * (p / q).log()).sum())
            n += 1
    assert result.n_tokens == n
    assert result.perplexity == pytest.approx(math.exp(nll / n), rel=1e-5)
    assert result.kl == pytest.approx(kl / n, rel=1e-3, abs=1e-6)
    whole = fidelity(case.checkpoint, proxy, TEXTS)
    assert result.n_tokens < whole.n_tokens
    assert (result.router_agreement, result.hidden_cosine) == (
        whole.router_agreement,
        pytest.approx(whole.hidden_cosine),
    )


def test_router_agreement_equals_loops_over_choices(case: Case, proxy: Proxy) -> None:
    result = fidelity(case.checkpoint, proxy, TEXTS)
    old, new = (profile(path, TEXTS).choices_TLK for path in (case.checkpoint.path, proxy.path))
    for row, layer in enumerate(case.checkpoint.moe_layers):
        keep, hits, asked = proxy.plan.keep[layer], 0, 0
        for wished, made in zip(old[:, row].tolist(), new[:, row].tolist(), strict=True):
            for expert in wished:
                asked += expert in keep
                hits += expert in [keep[i] for i in made]
        assert asked > hits > 0 or asked == hits > 0
        assert result.router_agreement[row] == pytest.approx(hits / asked)
    # Where every later layer sees another input, not every choice can be the same.
    assert min(result.router_agreement) < 1


def test_the_callers_score_is_asked_of_both_models(case: Case, proxy: Proxy) -> None:
    def n_experts(model: Any) -> float:
        assert not model.training
        return float(model.config.num_local_experts if case.kind == "qwen3_moe" else model.config.n_routed_experts)

    result = fidelity(case.checkpoint, proxy, TEXTS, score=n_experts)
    assert (result.score, result.score_proxy) == (case.checkpoint.n_experts, proxy.plan.n_keep)
    frame = result.to_frame().set_index("measure")
    assert frame.loc["task score", "proxy"] == proxy.plan.n_keep
    assert frame.loc["perplexity", "original"] == result.perplexity


def test_progress_reaches_the_end_once(case: Case, proxy: Proxy) -> None:
    told: list[tuple[int, int]] = []
    fidelity(case.checkpoint, proxy, TEXTS, batch_size=3, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {21}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1] == (21, 21)


def test_what_cannot_be_compared_is_refused(case: Case, proxy: Proxy) -> None:
    with pytest.raises(ProxyError, match="no text has a token to predict"):
        fidelity(case.checkpoint, proxy, ["1", "2"])
    with pytest.raises(ProxyError, match="there are 1 prompts for 7 texts"):
        fidelity(case.checkpoint, proxy, TEXTS, prompts=["1"])
    with pytest.raises(ProxyError, match="no text has a token to predict"):
        fidelity(case.checkpoint, proxy, TEXTS, prompts=TEXTS)
    other = dataclasses.replace(proxy, plan=dataclasses.replace(proxy.plan, checkpoint_fingerprint="0" * 64))
    with pytest.raises(ProxyError, match="made from another checkpoint"):
        fidelity(case.checkpoint, other, TEXTS)


def example(**changes: Any) -> Fidelity:
    made = Fidelity(8, 32, "cluster", 100, 5.0, 6.0, 0.125, 0.75, (0, 2), (0.5, math.nan), (0.9, 0.8))
    return dataclasses.replace(made, **changes)


def test_survives_saving(tmp_path: Path) -> None:
    result = example(score=0.5, score_proxy=0.25, provenance={"texts": 3})
    loaded = Fidelity.load(result.save(tmp_path / "f.json"))
    assert math.isnan(loaded.router_agreement[1])
    assert dataclasses.replace(loaded, router_agreement=()) == dataclasses.replace(result, router_agreement=())
    assert loaded.provenance == {"texts": 3}
    for text in ("", "{}", "[]", '{"format": 2}'):
        (tmp_path / "f.json").write_text(text)
        with pytest.raises(ProxyError, match=r"f\.json: the fidelity cannot be read"):
            Fidelity.load(tmp_path / "f.json")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProxyError, match="the fidelity cannot be written"):
        result.save(tmp_path / "file" / "f.json")


def test_reads_well() -> None:
    result = example(score=0.5, score_proxy=0.25)
    text = "Fidelity(cluster, 8 of 32: perplexity 5 -> 6, KL 0.125 nats, router agreement 50.0%, score 0.500 -> 0.250)"
    assert repr(result) == text
    assert "<table" in result._repr_html_()
    assert result.layers()["layer"].tolist() == [0, 2]
    assert np.isnan(result.layers()["router_agreement"][1])
    assert len(example().to_frame()) == 5
    assert len(result.to_frame()) == 6


@pytest.mark.parametrize("model_type", ["dbrx", "deepseek_v4", "gemma4_text", "gpt_oss", "longcat_flash", "nemotron_h"])
def test_families_with_decoder_layers_of_their_own(model_type: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m", model_type)
    n_experts = checkpoint.n_experts
    whole = build(checkpoint, plan_for(checkpoint, n_experts), tmp_path / "all", mtp="drop")
    fewer = build(checkpoint, plan_for(checkpoint, allowed_counts(checkpoint)[-2]), tmp_path / "fewer", mtp="drop")
    ids = [[3, 14, 15, 9, 26, 5], [35, 8, 9]]
    options: dict[str, Any] = {"batch_size": 2, "device": "cpu", "dtype": "float32"}
    same = compare_outputs(checkpoint, Checkpoint.open(whole.path), ids, **options)
    assert same.n_tokens == 7
    assert same.kl == pytest.approx(0, abs=1e-9)
    assert same.hidden_cosine == pytest.approx([1] * len(checkpoint.moe_layers), abs=1e-6)
    other = compare_outputs(checkpoint, Checkpoint.open(fewer.path), ids, **options)
    assert other.kl > 0
    assert min(other.hidden_cosine) < 1
