"""What single experts do: their tokens, partners and neighbours, as a table. Pure functions of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from moeproxy.experts.statistics import ExpertProfile
from moeproxy.proxy.plan import KeepPlan

Decode = Callable[[int], str]
_LEAST = 3  # tokens seen; below it a lift is chance


@dataclass(frozen=True)
class LayerTokens:
    """How often each expert of one layer was chosen for each token of the vocabulary.

    Attributes:
        ids_V: the token ids that occur in the calibration texts, ascending.
        count_V: how often each occurs.
        routed_EV: how often each was routed to each expert.
    """

    ids_V: Int[np.ndarray, " V"]
    count_V: Int[np.ndarray, " V"]
    routed_EV: Int[np.ndarray, "E V"]

    @classmethod
    def of(cls, profile: ExpertProfile, layer: int) -> LayerTokens | None:
        """Count the tokens of a layer; None where the profile kept no choices."""
        if not len(profile.choices_TLK):
            return None
        ids_V, place_T = np.unique(profile.tokens_T, return_inverse=True)
        chosen_TK = profile.choices_TLK[:, profile.moe_layers.index(layer)].astype(np.int64)
        cell_TK = chosen_TK * len(ids_V) + place_T[:, None]
        # Slots may hold no routed expert, in families with skip or zero experts.
        known = (chosen_TK >= 0) & (chosen_TK < profile.n_experts)
        routed = np.bincount(cell_TK[known], minlength=profile.n_experts * len(ids_V))
        return cls(ids_V, np.bincount(place_T), routed.reshape(profile.n_experts, len(ids_V)))

    def top(self, expert: int, n: int = 5) -> list[tuple[int, float]]:
        """The tokens that mark an expert: (token id, lift), at most `n`.

        Lift is the token's share among the expert's tokens, divided by its share among all. Ranked by how much each
        adds to the Kullback-Leibler divergence between the two, so that rare tokens do not crowd out the others.
        """
        routed_V = self.routed_EV[expert]
        return _marked(self.ids_V, routed_V, self.count_V / self.count_V.sum(), n)


def partners(profile: ExpertProfile, layer: int, expert: int, n: int = 3) -> list[tuple[int, float]]:
    """The experts that are chosen with `expert` more often than by chance: (expert, lift), at most `n`."""
    row = profile.moe_layers.index(layer)
    together_E = profile.cooccur_LEE[row, expert].copy()
    together_E[expert] = 0
    base_E = profile.load_LE[row].astype(np.float64)
    base_E[expert] = 0.0
    return _marked(np.arange(profile.n_experts), together_E, base_E / max(base_E.sum(), 1), n)


def _marked(ids: np.ndarray, count: np.ndarray, base: np.ndarray, n: int) -> list[tuple[int, float]]:
    share = count / max(int(count.sum()), 1)
    lift = share / np.maximum(base, 1e-300)
    gain = np.where((count >= _LEAST) & (lift > 1.0), share * np.log(np.maximum(lift, 1e-300)), -1.0)
    best = np.argsort(-gain, kind="stable")[:n]
    return [(int(ids[i]), float(lift[i])) for i in best if gain[i] > 0]


@dataclass(frozen=True)
class LayerFacts:
    """What the experts of one layer do, in words; it does not depend on how they are clustered.

    Attributes:
        layer: decoder layer number.
        share, partners, tokens: for every expert its share of the layer's tokens, the experts it is chosen with, and
            the tokens that mark it.
    """

    layer: int
    share: tuple[str, ...]
    partners: tuple[str, ...]
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, profile: ExpertProfile, layer: int, decode: Decode = str) -> LayerFacts:
        """Describe a layer; `decode` turns a token id into text."""
        load_E = profile.load_LE[profile.moe_layers.index(layer)]
        counted = LayerTokens.of(profile, layer)
        experts = range(profile.n_experts)
        return cls(
            layer,
            tuple(f"{share:.1%}" for share in load_E / max(int(load_E.sum()), 1)),
            tuple(_listed(partners(profile, layer, expert)) for expert in experts),
            tuple(_tokens(counted, expert, decode) for expert in experts),
        )


def expert_table(
    facts: LayerFacts,
    plan: KeepPlan,
    fused_EE: Float[np.ndarray, "E E"],
    experts: Iterable[int],
    forced: Mapping[int, str] | None = None,
) -> pd.DataFrame:
    """Return one row for each expert of one layer: role, use, partners, tokens, neighbours.

    Args:
        facts: of the layer.
        plan: which experts are kept, and which of them represents each other.
        fused_EE: distances of that layer.
        experts: the rows wanted.
        forced: expert -> what the user fixed ("always kept").
    """
    return pd.DataFrame(
        [
            {
                "layer": facts.layer,
                "expert": expert,
                "role": _role(plan, facts.layer, expert) + _wish((forced or {}).get(expert)),
                "share of tokens": facts.share[expert],
                "chosen together with": facts.partners[expert],
                "top tokens": facts.tokens[expert],
                "nearest experts": _nearest(fused_EE, expert),
            }
            for expert in experts
        ]
    )


def _role(plan: KeepPlan, layer: int, expert: int) -> str:
    kept, label = plan.keep[layer], int(plan.label_of(layer)[expert])
    if expert in kept:
        return "kept"
    return f"dropped, {kept[label]} stands for it" if label >= 0 else "dropped"


def _wish(what: str | None) -> str:
    return f" ({what})" if what else ""


def _listed(pairs: Sequence[tuple[object, float]]) -> str:
    return ", ".join(f"{name} ({lift:.1f}×)" for name, lift in pairs) or "none above chance"


def _tokens(tokens: LayerTokens | None, expert: int, decode: Decode) -> str:
    if tokens is None:
        return "not kept in this profile"
    return _listed([(visible(decode(token)), lift) for token, lift in tokens.top(expert)])


def _nearest(fused_EE: np.ndarray, expert: int, n: int = 3) -> str:
    order = [e for e in np.argsort(fused_EE[expert], kind="stable") if e != expert][:n]
    return ", ".join(f"{e} ({fused_EE[expert, e]:.2f})" for e in order)


def visible(text: str) -> str:
    """Return a token's text with blanks and control characters made visible."""
    shown = "".join("␣" if c == " " else c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown or "(empty)"
