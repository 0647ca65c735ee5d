"""How faithful a built proxy is to its original: next-token distributions, routing, hidden states, a task score."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moeproxy.errors import ProxyError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_tokenizer
from moeproxy.experts.profile import profile, tokenise
from moeproxy.files import atomic_file, provenance
from moeproxy.proxy.build import Proxy
from moeproxy.proxy.side_by_side import compare_outputs

__all__ = ["Fidelity", "Progress", "fidelity"]

FORMAT = 1
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fidelity:
    """A proxy held against its original on the same texts.

    Attributes:
        n_keep: experts the proxy keeps per layer.
        n_experts: experts of the original.
        method: how the proxy's were chosen.
        n_tokens: predicted tokens (padding, first tokens and prompts excluded).
        perplexity, perplexity_proxy: exp of the mean negative log-likelihood of the texts' next tokens.
        kl: mean KL divergence of the proxy's next-token distribution from the original's, KL(original || proxy), nats.
        top1_agreement: share of positions at which both give the largest probability to the same token (0..1).
        moe_layers: decoder layer numbers of the next two.
        router_agreement: of the original's choices that fall on kept experts, the share that the proxy makes too, by
            layer; NaN where none does.
        hidden_cosine: mean cosine of the two hidden states after each of these layers.
        score, score_proxy: of both models by the caller's measure, None without one.
        provenance: versions, command, time, settings, fingerprint of the original.
    """

    n_keep: int
    n_experts: int
    method: str
    n_tokens: int
    perplexity: float
    perplexity_proxy: float
    kl: float
    top1_agreement: float
    moe_layers: tuple[int, ...]
    router_agreement: tuple[float, ...]
    hidden_cosine: tuple[float, ...]
    score: float | None = None
    score_proxy: float | None = None
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def to_frame(self) -> pd.DataFrame:
        """One row a measure: measure, original, proxy; `original` is what a perfect proxy would have."""
        rows = [
            ("perplexity", self.perplexity, self.perplexity_proxy),
            ("KL to the original (nats)", 0.0, self.kl),
            ("same most likely token", 1.0, self.top1_agreement),
            ("router agreement on kept experts", 1.0, _mean(self.router_agreement)),
            ("cosine of hidden states", 1.0, _mean(self.hidden_cosine)),
        ]
        if self.score is not None and self.score_proxy is not None:
            rows.append(("task score", self.score, self.score_proxy))
        return pd.DataFrame(rows, columns=pd.Index(["measure", "original", "proxy"]))

    def layers(self) -> pd.DataFrame:
        """One row a layer with experts: layer, router_agreement, hidden_cosine."""
        columns = {
            "layer": list(self.moe_layers),
            "router_agreement": list(self.router_agreement),
            "hidden_cosine": list(self.hidden_cosine),
        }
        return pd.DataFrame(columns)

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, complete or not at all; return the path; raises ProxyError where that is impossible."""
        target, stored = Path(path), {"format": FORMAT, **asdict(self)}
        # JSON has no NaN.
        stored["router_agreement"] = [None if math.isnan(value) else value for value in self.router_agreement]
        try:
            with atomic_file(target) as temporary:
                temporary.write_text(json.dumps(stored) + "\n", "utf-8")
        except OSError as error:
            found = f"the fidelity cannot be written ({error.strerror or error})"
            raise ProxyError(found, remedy="choose a path you may write to, with space left", where=target) from error
        return target

    @classmethod
    def load(cls, path: str | Path) -> Fidelity:
        """Read what `save` wrote; raises ProxyError if the file is missing, cut off or of another format."""
        try:
            stored = json.loads(Path(path).read_text("utf-8"))
            if stored.pop("format") != FORMAT:
                raise ValueError("another format")
            for name in ("moe_layers", "router_agreement", "hidden_cosine"):
                stored[name] = tuple(math.nan if value is None else value for value in stored[name])
            return cls(**stored)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProxyError(
                "the fidelity cannot be read: the file is missing, cut off or something else",
                expected=f"JSON of format {FORMAT} written by Fidelity.save",
                remedy="measure it again and save the result",
                where=path,
            ) from error

    def __repr__(self) -> str:
        text = f"perplexity {self.perplexity:.3g} -> {self.perplexity_proxy:.3g}, KL {self.kl:.3g} nats, "
        text += f"router agreement {_mean(self.router_agreement):.1%}"
        if self.score is not None and self.score_proxy is not None:
            text += f", score {self.score:.3f} -> {self.score_proxy:.3f}"
        return f"Fidelity({self.method}, {self.n_keep} of {self.n_experts}: {text})"

    def _repr_html_(self) -> str:
        table = self.to_frame().to_html(index=False, float_format="{:.4g}".format, border=0)
        return f"<p>{html.escape(repr(self))}</p>{table}"


def fidelity(
    checkpoint: Checkpoint | str | Path,
    proxy: Proxy,
    texts: Sequence[str],
    *,
    prompts: Sequence[str] | None = None,
    score: Callable[[Any], float] | None = None,
    batch_size: int = 32,
    device: str = "cpu",
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Fidelity:
    """Run texts through original and proxy and compare what they predict, choose and compute.

    Both models are held in memory at once, and every text passes each of them twice, once to watch the routing.

    Args:
        checkpoint: the original.
        proxy: a proxy that was built from it.
        texts: texts like those of the training, with answers; they should not be the calibration texts.
        prompts: the beginning of each text whose tokens are not to be predicted. A prompt that nobody could predict
            (random numbers) otherwise drowns what happens to the answers.
        score: a measure of a loaded transformers model, larger being better, such as a task's accuracy.
        batch_size: texts a forward pass.
        device: torch device.
        dtype: dtype of the weights, "auto" for the stored one.
        progress: called with (passes of texts done, passes in all); there are three a text.

    Raises:
        CheckpointError, ProfileError: a model or the tokenizer is unusable.
        ProxyError: no text has a token to predict, there are not as many prompts as texts, or the proxy was made from
            another checkpoint.

    Example:
        >>> fidelity("data/models/qwen3_moe", proxy, ["12+7=19", "sort 312=123"]).kl
        0.21
    """
    original = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    written = Checkpoint.open(proxy.path)
    _check_source(original, proxy)
    ids = tokenise(original, texts)
    starts = _starts(original, texts, prompts)
    tell = _Passes(progress, len(ids))
    options: dict[str, Any] = {"batch_size": batch_size, "device": device, "dtype": dtype}
    chosen = [profile(model, texts, **options, progress=tell.next()).choices_TLK for model in (original, written)]
    outputs = compare_outputs(original, written, ids, **options, starts=starts, score=score, progress=tell.next())
    return Fidelity(
        n_keep=proxy.plan.n_keep,
        n_experts=original.n_experts,
        method=proxy.plan.method,
        n_tokens=outputs.n_tokens,
        perplexity=math.exp(min(outputs.nll, 700)),  # beyond that a float is infinite
        perplexity_proxy=math.exp(min(outputs.nll_proxy, 700)),
        kl=outputs.kl,
        top1_agreement=outputs.top1_agreement,
        moe_layers=original.moe_layers,
        router_agreement=tuple(_router_agreement(chosen[0], chosen[1], proxy, original.n_experts)),
        hidden_cosine=outputs.hidden_cosine,
        score=outputs.score,
        score_proxy=outputs.score_proxy,
        provenance=provenance(
            checkpoint=original.fingerprint,
            proxy=written.fingerprint,
            texts=len(texts),
            prompts=prompts is not None,
            **options,
        ),
    )


def _check_source(original: Checkpoint, proxy: Proxy) -> None:
    if proxy.plan.checkpoint_fingerprint != original.fingerprint:
        raise ProxyError(
            "the proxy was made from another checkpoint (fingerprints differ)",
            expected=f"a proxy of {original.fingerprint[:12]}, got one of {proxy.plan.checkpoint_fingerprint[:12]}",
            remedy="pass the checkpoint that the proxy was built from",
            where=proxy.path,
        )


def _starts(original: Checkpoint, texts: Sequence[str], prompts: Sequence[str] | None) -> list[int]:
    """Position of the first token to predict in each text that has any token."""
    if prompts is not None and len(prompts) != len(texts):
        raise ProxyError(
            f"there are {len(prompts)} prompts for {len(texts)} texts",
            expected="the beginning of every text",
            remedy="pass as many prompts as texts, or none",
        )
    tokenizer = load_tokenizer(original)
    ids = tokenizer(list(texts))["input_ids"]
    # The tokens that prompt and text share: an end token after the prompt, or one that spans the border, is none.
    asked = tokenizer(list(prompts))["input_ids"] if prompts else [[]] * len(ids)
    starts = [max(1, _shared(one, two)) for one, two in zip(asked, ids, strict=True) if two]
    if not any(len(two) > start for two, start in zip(filter(None, ids), starts, strict=True)):
        raise ProxyError(
            "no text has a token to predict",
            expected="texts of two tokens or more, longer than their prompts",
            remedy="pass longer texts",
            where=original.path,
        )
    return starts


def _shared(one: Sequence[int], two: Sequence[int]) -> int:
    """Length of the common beginning."""
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


class _Passes:
    """Progress over the three passes of the texts; a pass may count in other units than texts."""

    def __init__(self, progress: Progress | None, n_texts: int) -> None:
        self._progress, self._n_texts, self._number = progress, n_texts, -1

    def next(self) -> Progress | None:
        """The callback of the next pass."""
        self._number += 1
        number = self._number

        def tell(done: int, total: int) -> None:
            if self._progress:
                self._progress(number * self._n_texts + done * self._n_texts // total, 3 * self._n_texts)

        return tell if self._progress else None


def _router_agreement(choices_TLK: np.ndarray, proxy_TLK: np.ndarray, proxy: Proxy, n_experts: int) -> list[float]:
    """Of the original's choices that fall on kept experts, the share that the proxy makes too, by layer."""
    shares = []
    for row, layer in enumerate(sorted(proxy.plan.keep)):
        keep = proxy.plan.keep[layer]
        # The last place stands for a slot without a routed expert (-1).
        new_X = np.full(n_experts + 1, -1)
        new_X[list(keep)] = np.arange(len(keep))
        wished_TK = new_X[choices_TLK[:, row]]
        same_TK = (wished_TK[:, :, None] == proxy_TLK[:, row][:, None, :]).any(axis=2)
        kept_TK = wished_TK >= 0
        shares.append(float(same_TK[kept_TK].mean()) if kept_TK.any() else math.nan)
    return shares


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
