"""What single experts do: tokens, partners and neighbours with a known answer."""

from __future__ import annotations

import dataclasses

import numpy as np

from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.cluster import select
from moeproxy.proxy.similarity import distances
from moeproxy.view.expert_details import LayerFacts, LayerTokens, expert_table, partners, visible
from tests.proxy.made_up import made_up

TRADE = {3: 7, 5: 9}  # expert -> the token it alone works on, in layer 2


def specialised() -> ExpertProfile:
    """A profile of two layers in whose second one experts 3 and 5 have a trade; the others get anything."""
    rng = np.random.default_rng(0)
    tokens_T = rng.integers(0, 20, 2_000).astype(np.int32)
    choices_TLK = rng.choice([0, 1, 2, 4, 6, 7], (2_000, 2, 2)).astype(np.int16)
    for expert, token in TRADE.items():
        choices_TLK[tokens_T == token, 1, 0] = expert
    choices_TLK[:5, 1, 1] = -1  # slots without a routed expert
    choices_TLK[5:9, 1, 1] = 8
    profile = made_up(n_layers=2, n_experts=8)
    weights_TLK = np.full(choices_TLK.shape, 0.5, np.float16)
    kept = {"tokens_T": tokens_T, "choices_TLK": choices_TLK, "weights_TLK": weights_TLK}
    return dataclasses.replace(profile, n_tokens=2_000, **kept)


def test_tokens_are_counted_as_by_hand() -> None:
    profile = specialised()
    counted = LayerTokens.of(profile, 2)
    assert counted is not None
    expected_EV = np.zeros((8, len(counted.ids_V)), dtype=int)
    for token, chosen in zip(profile.tokens_T, profile.choices_TLK[:, 1], strict=True):
        for expert in chosen[(chosen >= 0) & (chosen < 8)]:
            expected_EV[expert, int(np.flatnonzero(counted.ids_V == token)[0])] += 1
    np.testing.assert_array_equal(counted.routed_EV, expected_EV)
    assert counted.count_V.sum() == 2_000


def test_an_expert_is_known_by_its_trade() -> None:
    profile = specialised()
    counted = LayerTokens.of(profile, 2)
    assert counted is not None
    for expert, token in TRADE.items():
        found, lift = counted.top(expert)[0]
        assert found == token
        assert lift == 2_000 / counted.count_V[counted.ids_V == token][0]
    assert max(lift for _, lift in counted.top(0)) < 2, "no trade, no mark"


def test_partners_are_chosen_together_more_often_than_by_chance() -> None:
    profile = made_up(n_layers=1, n_experts=6)
    together_EE = np.full((6, 6), 10)
    together_EE[1, 4] = together_EE[4, 1] = 90
    even = np.full((1, 6), 100)
    profile = dataclasses.replace(profile, load_LE=even, cooccur_LEE=together_EE[None] + 90 * np.eye(6, dtype=int))
    assert [expert for expert, _ in partners(profile, 1, 1)] == [4]
    assert [expert for expert, _ in partners(profile, 1, 4)] == [1]
    assert partners(profile, 1, 0) == []


def test_table_says_role_use_tokens_and_neighbours() -> None:
    profile = specialised()
    plan, fused_LEE = select(profile, 4), distances(profile).fuse()
    facts = LayerFacts.of(profile, 2, decode=lambda token: f"<{token}>")
    table = expert_table(facts, plan, fused_LEE[1], range(8), {3: "always kept"})
    assert table["layer"].tolist() == 8 * [2]
    kept = [role.startswith("kept") for role in table["role"]]
    assert np.flatnonzero(kept).tolist() == list(plan.keep[2])
    for expert, role in enumerate(table["role"]):
        if expert not in plan.keep[2]:
            assert role.startswith(f"dropped, {plan.keep[2][plan.label_of(2)[expert]]} stands for it")
    assert table["role"][3].endswith("(always kept)")
    assert table["top tokens"][3].startswith("<7> (")
    nearest = int(table["nearest experts"][0].split(" ")[0])
    others = fused_LEE[1, 0].copy()
    others[0] = np.inf
    assert nearest == int(others.argmin())


def test_a_profile_without_choices_says_so() -> None:
    profile = made_up()
    assert LayerTokens.of(profile, 1) is None
    facts = LayerFacts.of(profile, 1)
    assert set(facts.tokens) == {"not kept in this profile"}


def test_blanks_and_control_characters_are_visible() -> None:
    assert visible(" a b\n") == "␣a␣b\\n"
    assert visible("") == "(empty)"
