"""The quick look misses nothing, with or without the words of the stretch ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeproxy.traces.logs.looking import BAR, INTERESTING, LOOK, NOTHING, Looker, progress

LINES = [
    b"{ 'a': 1}",
    b'{"a": 1}',
    b"x step: 1 - ",
    b"iteration  1/ 2 |",
    b"Traceback",
    b"KeyError",
    b"error",
    b"OOM",
    b"Step 3 | Loss",
    b"===== Step 3/5 =====",
    b"===== Epoch 3/5 =====",
    b"trl==1.16.0",
    b"transformers version: 5",
    b"out of memory",
    b"Killed",
    b"SIGTERM",
    b"NCCL",
    b"Segmentation",
    b"segmentation",
    b"1/2 [0<0, loss=1]",
    b"\x1b[31m1/2 [0",
    b"core dumped",
    b"No space left",
    b"Train step 1/45 done",
    "  • Loss: 1".encode(),
    "╒══".encode(),
    b"Training Results:",
    b"Timing: ",
]
DULL = [b"", b"words [in] brackets", b"{ 1", b"a step: no", b"Timing: 5", b"Step by step", b"a == b"]


@pytest.mark.parametrize("line", LINES)
def test_worth_a_look(line: bytes) -> None:
    assert Looker().kind(line) == LOOK
    assert INTERESTING.search(line)


@pytest.mark.parametrize("line", DULL)
def test_dull(line: bytes) -> None:
    assert Looker().kind(line) == NOTHING


def test_bars() -> None:
    line = b"a: 1/3 [x]  66%|##  | 2/3 [00:01<00:01,  1.0s/it]"
    assert Looker().kind(line) == BAR
    assert progress(line) == "2/3"


@given(st.lists(st.sampled_from([*LINES, *DULL, b"1/2 [0"]), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_lies_ahead_changes_nothing(lines: list[bytes], dice) -> None:
    joined = [b" ".join(dice.sample(lines, dice.randint(1, len(lines)))) for _ in range(3)]
    looker, plain = Looker(), Looker()
    looker.ahead(b"\n".join(joined))
    for line in joined:
        assert looker.kind(line) == plain.kind(line)
        assert (plain.kind(line) != NOTHING) == bool(INTERESTING.search(line))
