"""Pass the same tokens through two models and compare their logits and hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.experts.profile import pad

__all__ = ["Outputs", "compare_outputs"]


@dataclass(frozen=True)
class Outputs:
    """What `compare_outputs` measured; see `fidelity.Fidelity`. `nll` are mean negative log-likelihoods in nats."""

    n_tokens: int
    nll: float
    nll_proxy: float
    kl: float
    top1_agreement: float
    hidden_cosine: tuple[float, ...]
    score: float | None
    score_proxy: float | None


def compare_outputs(
    original: Checkpoint,
    proxy: Checkpoint,
    texts: Sequence[list[int]],
    *,
    batch_size: int,
    device: str,
    dtype: str,
    starts: Sequence[int] | None = None,
    score: Callable[[Any], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outputs:
    """Compare two models on lists of token ids, of which one has a token to predict at least.

    Args:
        original, proxy: the models; equal but for their experts.
        texts: token ids of each text.
        starts: position of the first token of each text that is to be predicted; 1 for all if None.
        batch_size, device, dtype, score, progress: see `fidelity.fidelity`.
    """
    models = [load_model(checkpoint, dtype=dtype, device=device).eval() for checkpoint in (original, proxy)]
    modules = [_decoder_layers(model, original) for model in models]
    sums = _Sums.zeros(len(original.moe_layers))
    with torch.inference_mode():
        for start in range(0, len(texts), batch_size):
            ids_BT, mask_BT = (tensor.to(device) for tensor in pad(list(texts[start : start + batch_size])))
            first_B = torch.tensor(starts[start : start + batch_size] if starts else [1] * len(ids_BT), device=device)
            _add_batch(models, modules, ids_BT, mask_BT, first_B, sums)
            if progress:
                progress(min(start + batch_size, len(texts)), len(texts))
    scores = [float(score(model)) if score else None for model in models]
    return sums.result(scores)


@dataclass
class _Sums:
    """Running sums over predicted tokens, and of cosines over all tokens."""

    n_tokens: int
    n_valid: int
    losses: Tensor
    cosine_L: Tensor

    @classmethod
    def zeros(cls, n_layers: int) -> _Sums:
        # losses: negative log-likelihood of both, KL, equal most likely tokens.
        return cls(0, 0, torch.zeros(4, dtype=torch.float64), torch.zeros(n_layers, dtype=torch.float64))

    def result(self, scores: Sequence[float | None]) -> Outputs:
        nll, nll_proxy, kl, same = (self.losses / self.n_tokens).tolist()
        cosine = tuple((self.cosine_L / self.n_valid).tolist())
        # Rounding can leave the divergence of equal distributions just below zero.
        return Outputs(self.n_tokens, nll, nll_proxy, max(kl, 0.0), same, cosine, scores[0], scores[1])


def _decoder_layers(model: nn.Module, checkpoint: Checkpoint) -> list[nn.Module]:
    """The decoder layers that hold experts."""
    block = checkpoint.family.memory_block or checkpoint.family.block
    start = block.partition("{layer}")[0]
    return [model.get_submodule(f"{start}{layer}") for layer in checkpoint.moe_layers]


def _add_batch(
    models: Sequence[Any],
    modules: Sequence[list[nn.Module]],
    ids_BT: Tensor,
    mask_BT: Tensor,
    first_B: Tensor,
    sums: _Sums,
) -> None:
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT.long(), "use_cache": False}
    hidden: dict[int, Tensor] = {}

    def compare(row: int, other: Tensor) -> None:
        one_TX, other_TX = (tensor.flatten(0, 1).flatten(1)[mask_BT.flatten()] for tensor in (hidden.pop(row), other))
        sums.cosine_L[row] += nn.functional.cosine_similarity(one_TX.float(), other_TX.float()).double().sum().cpu()

    # The second model's hidden states are compared as they come, so that only one copy is held.
    with _listening(modules[0], hidden.__setitem__):
        logits_BTV = models[0](**inputs).logits
    with _listening(modules[1], compare):
        other_BTV = models[1](**inputs).logits
    position_T = torch.arange(1, ids_BT.shape[1], device=ids_BT.device)
    predicts_BT = mask_BT[:, 1:] & (position_T >= first_B[:, None])
    next_S = ids_BT[:, 1:][predicts_BT]
    sums.losses += _losses(logits_BTV[:, :-1][predicts_BT], other_BTV[:, :-1][predicts_BT], next_S).cpu()
    sums.n_tokens += len(next_S)
    sums.n_valid += int(mask_BT.sum())


def _losses(logits_SV: Tensor, other_SV: Tensor, next_S: Tensor) -> Tensor:
    """Sums over positions: negative log-likelihood of both, KL(first || second), equal most likely tokens."""
    one_SV, two_SV = (logits.float().log_softmax(dim=1) for logits in (logits_SV, other_SV))
    kl_S = nn.functional.kl_div(two_SV, one_SV, log_target=True, reduction="none").sum(dim=1)
    same_S = one_SV.argmax(dim=1) == two_SV.argmax(dim=1)
    likely = [-log_SV.gather(1, next_S[:, None])[:, 0] for log_SV in (one_SV, two_SV)]
    return torch.stack([values_S.double().sum() for values_S in (*likely, kl_S, same_S)])


@contextmanager
def _listening(modules: Sequence[nn.Module], heard: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Pass every module's output (the first of several) to `heard` with the module's position."""

    def hook_of(row: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            heard(row, output[0] if isinstance(output, tuple) else output)

        return hook

    handles = [module.register_forward_hook(hook_of(row)) for row, module in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
