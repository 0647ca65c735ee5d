"""GRPOProgram and Layout: slices and proxies of real configs, and what is possible when it is not."""

from __future__ import annotations

from typing import Any

import pytest

from moeproxy.errors import ScaleError
from moeproxy.experts.published import DEEPSEEK_V3, QWEN3_30B_A3B
from moeproxy.scale import GRPOProgram, Layout
from tests.scale.conftest import TINY


def test_a_slice_keeps_one_dense_layer() -> None:
    whole = GRPOProgram(DEEPSEEK_V3)
    assert (whole.n_layers, whole.n_dense, whole.n_experts, whole.top_k) == (61, 3, 256, 8)
    part = whole.sliced(4)
    assert (part.n_layers, part.n_dense) == (4, 1)
    assert whole.n_layers == 61, "the program itself is unchanged"
    assert GRPOProgram(QWEN3_30B_A3B).sliced(4).n_dense == 0


def test_a_proxy_differs_in_the_number_of_experts_only() -> None:
    proxy = GRPOProgram(QWEN3_30B_A3B).pruned(48)
    assert proxy.n_experts == 48
    assert {**proxy.config, "num_experts": 128} == dict(QWEN3_30B_A3B)


def test_a_program_survives_storage(program: GRPOProgram) -> None:
    assert GRPOProgram.from_dict(program.to_dict()) == program
    assert "2 layers x 8 experts, 1 x 2 x 64 tokens" in repr(program)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GRPOProgram(TINY, sequences=0), "sequences is 0"),
        (lambda: GRPOProgram(TINY, prompt=500, completion=500), "1000 tokens in a model with 512"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, temperature=0.0), "temperature is 0"),
        (
            lambda: GRPOProgram({k: v for k, v in TINY.items() if k != "num_experts"}, prompt=8, completion=8),
            "says no number of experts",
        ),
        (
            lambda: GRPOProgram({k: v for k, v in TINY.items() if k != "num_hidden_layers"}, prompt=8, completion=8),
            "says no number of layers",
        ),
        (
            lambda: GRPOProgram({k: v for k, v in TINY.items() if k != "num_experts_per_tok"}, prompt=8, completion=8),
            "num_experts_per_tok is None.*1 to 8",
        ),
        (
            lambda: GRPOProgram({**TINY, "num_hidden_layers": 0}, prompt=8, completion=8),
            "num_hidden_layers is 0.*at least 1",
        ),
        (lambda: GRPOProgram({**TINY, "num_hidden_layers": -2}, prompt=8, completion=8), "num_hidden_layers is -2"),
        (lambda: GRPOProgram({**TINY, "hidden_size": -64}, prompt=8, completion=8), "hidden_size is -64"),
        (
            lambda: GRPOProgram({**TINY, "hidden_size": "64"}, prompt=8, completion=8),
            "hidden_size is '64', of type str",
        ),
        (lambda: GRPOProgram({**TINY, "vocab_size": 0}, prompt=8, completion=8), "vocab_size is 0"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, learning_rate=float("nan")), "learning_rate is nan"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, learning_rate=-1.0), "learning_rate is -1"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, clip=-1.0), "clip is -1"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, max_norm=float("inf")), "max_norm is inf"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8, seed=-1), "seed is -1"),
        (lambda: GRPOProgram({**TINY, "num_experts_per_tok": 9}, prompt=8, completion=8), "is 9.*1 to 8"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8).sliced(3), "1 to 2"),
        (lambda: GRPOProgram(TINY, prompt=8, completion=8).pruned(1), "7 counts from 2 to 8, such as 2 or 3"),
        (lambda: GRPOProgram(DEEPSEEK_V3).pruned(20), "31 counts from 16 to 256, such as 16 or 24"),
        (lambda: Layout(1, 1), "at least 2 ranks"),
        (lambda: Layout(12, 8), "one of 1, 2, 3, 4, 6, 12"),
        (lambda: Layout(8, 4, 8), "0 to 7"),
        (lambda: Layout(8, 0), "one of 1, 2, 4, 8"),
        (lambda: Layout(1_000_000, 3), "80, 100, 125 and 33 larger ones"),
        (lambda: Layout(12, 12).check_experts(8), "in a world of 12, ep = 1, 2, 4"),
    ],
)
def test_the_impossible_is_refused_with_what_is_possible(make: Any, words: str) -> None:
    with pytest.raises(ScaleError, match=words):
        make()


def test_a_layout_knows_its_neighbours() -> None:
    layout = Layout(16, 4, 6)
    assert (layout.ep_rank, layout.efsdp) == (2, 4)
