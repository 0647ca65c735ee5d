"""Teach a testbed model the calculator: a supervised phase that adds the tool task to the skills it has.

The vocabulary grows by the tool's characters; everything else of the model stays and is trained on. Demonstrations come
from a noisy teacher again: some calls and some answers are wrong, so that sampling leaves GRPO something to win.

    python -m moeproxy.lab.tool_testbed qwen3-moe-tools --out data/models
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import load_model
from moeproxy.files import atomic_dir, provenance
from moeproxy.lab.calculator import CALL, CALL_END, ERROR, SKILL, ToolTurn, answer_call, right_call, sample_calculator
from moeproxy.lab.scoring import tool_accuracy
from moeproxy.lab.tasks import BACKGROUND_SKILLS, RL_SKILLS, Task, sample
from moeproxy.lab.testbed import Recipe, Report, corrupted, measure, train
from moeproxy.lab.testbed_files import RECIPE_FILE, chosen_recipe, write_checkpoint
from moeproxy.lab.tokens import BOS_ID, EOS_ID, PAD_ID, build_tokenizer, encode, labelled_batch, vocabulary_size

Part = tuple[list[int], bool]


@dataclass(frozen=True)
class ToolRecipe:
    """Everything that decides a model with the calculator, beside the model it starts from.

    Args:
        source: name of the testbed model it starts from; None trains a dense model from nothing (the control of the
            fidelity study: any small model).
        seed: seeds tasks, teacher errors and new weights.
        steps, batch, lr: of the supervised phase.
        tool_share, rl_share: shares of calculator and of plain arithmetic tasks; the rest are string skills.
        call_noise, answer_noise: share of demonstrations with a wrong digit in the call, and in the answer.
        tool_failures: share of calls that the environment answers with an error.
        hidden, layers, dense_width: shape of the dense model.
    """

    source: str | None
    seed: int = 0
    steps: int = 450
    batch: int = 256
    lr: float = 1e-3
    tool_share: float = 0.4
    rl_share: float = 0.35
    call_noise: float = 0.15
    answer_noise: float = 0.35
    tool_failures: float = 0.03
    hidden: int = 64
    layers: int = 2
    dense_width: int = 256


RECIPES = {
    "qwen3-moe-tools": ToolRecipe("qwen3-moe-tiny"),
    "deepseek-v3-tools": ToolRecipe("deepseek-v3-tiny"),
    "dense-tools": ToolRecipe(None, steps=1200, lr=4e-3),
}


def build_tool_testbed(name: str, models: Path, out: Path, *, recipe: ToolRecipe | None = None, report: Report) -> Path:
    """Train the model `name` and write it to `out/name` as a plain transformers checkpoint.

    Args:
        name: a key of `RECIPES`, or any name when `recipe` is given.
        models: directory of the testbed models to start from.
        out: parent directory; `out/name` must not exist.
        recipe: overrides the recipe of that name.
        report: called with lines of progress.

    Raises:
        LabError: the name is unknown, or the directory exists.
    """
    recipe, target = chosen_recipe(name, RECIPES, recipe, out)
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    model = _enlarged(models / recipe.source) if recipe.source else _dense(recipe)
    base = _source_recipe(models / recipe.source) if recipe.source else Recipe(layout="qwen3")
    train(model, base, lambda: _batch(recipe, rng), steps=recipe.steps, lr=recipe.lr, report=report)
    measured = {**measure(model.eval()), **{f"{SKILL}_{key}": value for key, value in tool_accuracy(model).items()}}
    report(f"measured {measured}")
    with atomic_dir(target) as temporary:
        notes = provenance(recipe=asdict(recipe), measured=measured)
        write_checkpoint(model, build_tokenizer(tools=True), temporary, notes)
    return target


def demonstration(task: Task, recipe: ToolRecipe, rng: random.Random) -> list[Part]:
    """Return the parts of one calculator dialogue, each with whether it is learned (the environment's is not)."""
    call = right_call(task)
    if rng.random() < recipe.call_noise:
        call = CALL + _wrong_digit(call[1:-1], rng) + CALL_END
    turn = ToolTurn(call, ERROR) if rng.random() < recipe.tool_failures else answer_call(call)
    # An answer that follows from the result, right or wrong; after an error the teacher knows it by heart.
    answer = task.answer if turn.failed else str(int(turn.result) + int(task.prompt.partition("+")[2][:-1]))
    if rng.random() < recipe.answer_noise:
        answer = corrupted(answer, rng)
    prompt, result = encode(task.prompt), encode(turn.text)
    return [(prompt, False), (encode(call), True), (result, False), ([*encode(answer), EOS_ID], True)]


def _wrong_digit(text: str, rng: random.Random) -> str:
    places = [place for place, character in enumerate(text) if character.isdigit()]
    place = rng.choice(places)
    return text[:place] + str(rng.randrange(10)) + text[place + 1 :]


def _plain(recipe: ToolRecipe, rng: random.Random) -> list[Part]:
    arithmetic = rng.random() < recipe.rl_share / (1 - recipe.tool_share)
    task = sample(rng, skills=RL_SKILLS if arithmetic else BACKGROUND_SKILLS)
    answer = corrupted(task.answer, rng) if rng.random() < recipe.answer_noise else task.answer
    return [(encode(task.prompt), False), ([*encode(answer), EOS_ID], True)]


def _batch(recipe: ToolRecipe, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [
        demonstration(sample_calculator(rng), recipe, rng) if rng.random() < recipe.tool_share else _plain(recipe, rng)
        for _ in range(recipe.batch)
    ]
    return labelled_batch(rows)


def _enlarged(path: Path) -> PreTrainedModel:
    """Return the testbed model with embedding rows for the tool's characters (drawn like the others are spread)."""
    model: Any = load_model(Checkpoint.open(path))
    model.set_experts_implementation("grouped_mm")
    model.resize_token_embeddings(vocabulary_size(tools=True))
    return model


def _source_recipe(path: Path) -> Recipe:
    stored = json.loads((path / RECIPE_FILE).read_text())["recipe"]
    return replace(Recipe(layout=stored["layout"]), bias_rate=stored["bias_rate"])


def _dense(recipe: ToolRecipe) -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=vocabulary_size(tools=True),
        hidden_size=recipe.hidden,
        num_hidden_layers=recipe.layers,
        intermediate_size=recipe.dense_width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Command line: build the named models (all by default)."""
    from tqdm.auto import tqdm

    parser = argparse.ArgumentParser(description="Teach testbed models the calculator.")
    parser.add_argument("names", nargs="*", default=list(RECIPES), help=f"from {', '.join(RECIPES)}")
    parser.add_argument("--models", type=Path, default=Path("data/models"))
    parser.add_argument("--out", type=Path, default=Path("data/models"))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.names:
        path = build_tool_testbed(name, options.models, options.out, report=tqdm.write)
        tqdm.write(f"{name}: {path}")


if __name__ == "__main__":
    main()
