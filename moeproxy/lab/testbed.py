"""Build the shipped testbed models: tiny MoEs in two real layouts, trained here on verifiable tasks.

Recipe: train a dense model on all skills with a noisy teacher, split every feed-forward block into experts (sparse
upcycling, arXiv 2212.05055, with a random part of the neurons each and noise), then train on with real top-k routing.
The teacher's errors leave the sampled answers worse than the greedy ones: that gap is what GRPO can win back.

    python -m moeproxy.lab.testbed qwen3-moe-tiny --out data/models

"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moeproxy.errors import LabError
from moeproxy.files import atomic_dir, provenance
from moeproxy.lab.balance import BiasBalancer
from moeproxy.lab.scoring import accuracy, sampled_reward
from moeproxy.lab.tasks import BACKGROUND_SKILLS, DIGITS, LETTERS, RL_SKILLS, sample
from moeproxy.lab.testbed_files import chosen_recipe, write_checkpoint
from moeproxy.lab.tokens import BOS_ID, EOS_ID, PAD_ID, build_tokenizer, supervised_batch, vocabulary_size

Report = Callable[[str], None]


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a testbed model.

    Args:
        layout: `qwen3_moe` or `deepseek_v3`.
        seed: seeds initial weights, tasks, teacher errors and the split into experts.
        dense_steps, moe_steps: optimizer steps before and after upcycling.
        dense_width: feed-forward neurons of the dense model.
        teacher_noise: share of the answers with one wrong character, in each of the two phases.
        rl_share: share of the tasks drawn from the RL domain.
        upcycle_noise: standard deviation of the noise on expert weights, in units of the weights' own.
        aux_loss_coef: weight of the load-balancing loss (Qwen3 layout only).
        bias_rate: step of the correction bias (DeepSeek layout only; arXiv 2408.15664).
    """

    layout: str
    seed: int = 0
    hidden: int = 96
    layers: int = 4
    experts: int = 32
    top_k: int = 4
    expert_width: int = 48
    dense_width: int = 384
    dense_steps: int = 1400
    moe_steps: int = 1200
    batch: int = 512
    dense_lr: float = 3e-3
    moe_lr: float = 2e-3
    dense_noise: float = 0.3
    teacher_noise: float = 0.4
    rl_share: float = 0.5
    upcycle_noise: float = 1.0
    aux_loss_coef: float = 0.001
    bias_rate: float = 0.001


RECIPES: dict[str, Recipe] = {
    "qwen3-moe-tiny": Recipe(layout="qwen3_moe"),
    "deepseek-v3-tiny": Recipe(layout="deepseek_v3"),
}


def build_testbed(
    name: str, out: Path, *, recipe: Recipe | None = None, report: Report | None = None, device: str = "cpu"
) -> Path:
    """Train the testbed model `name` and write it to `out/name` as a plain transformers checkpoint.

    Args:
        name: a key of `RECIPES`, or any name when `recipe` is given.
        out: parent directory; `out/name` must not exist.
        recipe: overrides the recipe of that name.
        report: called with one line of progress every hundred steps.
        device: where to train, `cpu` or `cuda`.

    Raises:
        LabError: the name is unknown, or the directory exists.
    """
    recipe, target = chosen_recipe(name, RECIPES, recipe, out)
    say = report or (lambda line: None)
    model = train_testbed(recipe, say, device)
    measured = measure(model)
    say(f"measured {measured}")
    with atomic_dir(target) as temporary:
        notes = provenance(recipe=asdict(recipe), measured=measured, device=device)
        write_checkpoint(model, build_tokenizer(), temporary, notes)
    return target


def train_testbed(recipe: Recipe, report: Report, device: str = "cpu") -> PreTrainedModel:
    """Train the model of `recipe`: dense, upcycled, sparse; it comes back on the CPU."""
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    dense = _dense_model(recipe).to(device)
    train(
        dense,
        recipe,
        lambda: _teacher_batch(recipe, rng, recipe.dense_noise),
        steps=recipe.dense_steps,
        lr=recipe.dense_lr,
        report=report,
    )
    sparse = _sparse_model(recipe)
    upcycle(dense.cpu().state_dict(), sparse, recipe, torch.Generator().manual_seed(recipe.seed))
    train(
        sparse.to(device),
        recipe,
        lambda: _teacher_batch(recipe, rng, recipe.teacher_noise),
        steps=recipe.moe_steps,
        lr=recipe.moe_lr,
        report=report,
    )
    return sparse.cpu().eval()


def measure(model: PreTrainedModel) -> dict[str, float]:
    """Return greedy accuracy on the test split for each part of the tasks, and the mean sampled reward."""
    rl = accuracy(model, RL_SKILLS, n=280, split="test")
    rest = accuracy(model, BACKGROUND_SKILLS, n=480, split="test")
    return {
        "accuracy_rl": round(rl.mean, 4),
        **{f"accuracy_{skill}": round(value, 4) for skill, value in rl.by_skill.items()},
        "chance_rl": round(rl.chance, 4),
        "accuracy_background": round(rest.mean, 4),
        "sampled_reward_rl": round(sampled_reward(model, RL_SKILLS, n=400, split="test", seed=0), 4),
    }


def train(
    model: PreTrainedModel,
    recipe: Recipe,
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    lr: float,
    report: Report,
) -> None:
    """Train `model` in place by cross-entropy on the batches (ids, labels) of `draw` (one-cycle AdamW)."""
    device = model.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _one_cycle(step / steps))
    sparse = any(name.endswith(".experts") for name, _ in model.named_modules())
    balancer = BiasBalancer(model, recipe.bias_rate) if sparse and recipe.layout == "deepseek_v3" else None
    # The router logits are asked for in the call: left in the config they break generation with a cache.
    extra: dict[str, Any] = {"output_router_logits": True} if sparse and recipe.layout == "qwen3_moe" else {}
    model.train()
    started = time.monotonic()
    for step in range(steps):
        ids, labels = (tensor.to(device) for tensor in draw())
        loss = model(input_ids=ids, attention_mask=(ids != PAD_ID).long(), labels=labels, **extra).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if balancer:
            balancer.step()
        if step % 100 == 0 or step == steps - 1:
            kind = "sparse" if sparse else "dense"
            report(f"{kind} step {step + 1}/{steps} loss {loss.item():.3f} {time.monotonic() - started:.0f} s")
    if balancer:
        balancer.close()


def upcycle(
    dense: Mapping[str, torch.Tensor], sparse: PreTrainedModel, recipe: Recipe, generator: torch.Generator
) -> None:
    """Copy a dense model into `sparse`: shared tensors as they are, each expert a random part of the neurons.

    The down projection is scaled by dense width over expert width, since the router's weights sum to one.
    """
    state = sparse.state_dict()
    copied = {name: dense[name] for name in state if name in dense and dense[name].shape == state[name].shape}
    for name in state:
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("experts.gate_up_proj")
            copied.update(_split_block(dense, state, prefix, recipe, generator))
    sparse.load_state_dict({**state, **copied})


def _split_block(
    dense: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    prefix: str,
    recipe: Recipe,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    gate, up, down = (dense[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
    gate_up_EFD = torch.empty_like(state[f"{prefix}experts.gate_up_proj"])
    down_EDF = torch.empty_like(state[f"{prefix}experts.down_proj"])

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.randn(weight.shape, generator=generator) * weight.std() * recipe.upcycle_noise

    scale = recipe.dense_width / recipe.expert_width
    for expert in range(recipe.experts):
        part = torch.randperm(recipe.dense_width, generator=generator)[: recipe.expert_width]
        gate_up_EFD[expert] = torch.cat([noisy(gate[part]), noisy(up[part])])
        down_EDF[expert] = scale * noisy(down[:, part])
    return {f"{prefix}experts.gate_up_proj": gate_up_EFD, f"{prefix}experts.down_proj": down_EDF}


def _dense_model(recipe: Recipe) -> Any:
    if recipe.layout == "qwen3_moe":
        return Qwen3ForCausalLM(Qwen3Config(intermediate_size=recipe.dense_width, **_common(recipe), **_QWEN3))
    return DeepseekV3ForCausalLM(_deepseek_config(recipe, first_k_dense_replace=recipe.layers))


def _sparse_model(recipe: Recipe) -> Any:
    if recipe.layout == "deepseek_v3":
        model = DeepseekV3ForCausalLM(_deepseek_config(recipe, first_k_dense_replace=1))
    elif recipe.layout == "qwen3_moe":
        config = Qwen3MoeConfig(
            intermediate_size=recipe.dense_width,
            moe_intermediate_size=recipe.expert_width,
            num_experts=recipe.experts,
            num_experts_per_tok=recipe.top_k,
            norm_topk_prob=True,
            router_aux_loss_coef=recipe.aux_loss_coef,
            **_common(recipe),
            **_QWEN3,
        )
        model = Qwen3MoeForCausalLM(config)
    else:
        raise LabError(f"unknown layout {recipe.layout!r}", expected="qwen3_moe or deepseek_v3")
    model.set_experts_implementation("grouped_mm")  # 7 times as fast as the eager loop on a CPU
    return model


_QWEN3: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32}


def _common(recipe: Recipe) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary_size(),
        "hidden_size": recipe.hidden,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "tie_word_embeddings": True,
    }


def _deepseek_config(recipe: Recipe, *, first_k_dense_replace: int) -> DeepseekV3Config:
    return DeepseekV3Config(
        intermediate_size=recipe.dense_width,
        moe_intermediate_size=recipe.expert_width,
        n_routed_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=first_k_dense_replace,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        **_common(recipe),
    )


def _teacher_batch(recipe: Recipe, rng: random.Random, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    tasks = [
        sample(rng, skills=RL_SKILLS if rng.random() < recipe.rl_share else BACKGROUND_SKILLS)
        for _ in range(recipe.batch)
    ]
    answers = [corrupted(task.answer, rng) if rng.random() < noise else task.answer for task in tasks]
    return supervised_batch(tasks, answers)


def corrupted(text: str, rng: random.Random) -> str:
    """Return `text` with one character replaced by another draw of its kind (digit or letter)."""
    place = rng.randrange(len(text))
    alphabet = DIGITS if text[place] in DIGITS else LETTERS
    return text[:place] + rng.choice(alphabet) + text[place + 1 :]


def _one_cycle(share: float) -> float:
    """Return the learning-rate factor: linear warm-up over the first 15 %, then a cosine to zero."""
    if share < 0.15:
        return share / 0.15
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (share - 0.15) / 0.85)))


def main() -> None:
    """Command line: build the named testbed models (all by default)."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="Train the testbed models that data/models ships.")
    parser.add_argument("names", nargs="*", default=list(RECIPES), help=f"from {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, default=Path("data/models"))
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    parser.add_argument("--seed", type=int, default=None, help="another seed than the recipe's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.names:
        recipe = RECIPES.get(name)
        if recipe and options.seed is not None:
            recipe = replace(recipe, seed=options.seed)
        path = build_testbed(name, options.out, recipe=recipe, report=tqdm.write, device=options.device)
        tqdm.write(f"{name}: {path}")


if __name__ == "__main__":
    main()
