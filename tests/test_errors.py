"""Errors say where, what was found, what was expected and what to do."""

from __future__ import annotations

import pickle

import pytest

from moeproxy import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ValueError)]


def test_full_message_reads_as_sentences() -> None:
    error = errors.TraceError(
        "the file ends early", expected="a Parquet footer", remedy="copy it again", where="a.parquet"
    )
    assert str(error) == "a.parquet: the file ends early. Expected: a Parquet footer. What to do: copy it again."
    assert (error.found, error.where) == ("the file ends early", "a.parquet")


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "no model"),
        ({"where": "dir"}, "dir: no model"),
        ({"remedy": "name one"}, "no model. What to do: name one."),
        ({"expected": "one"}, "no model. Expected: one."),
    ],
)
def test_absent_parts_leave_no_gap(parts: dict[str, str], text: str) -> None:
    assert str(errors.CheckpointError("no model", **parts)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_value_error_and_documented(kind: type[errors.MoeproxyError]) -> None:
    assert issubclass(kind, errors.MoeproxyError)
    assert kind.__doc__
    with pytest.raises(ValueError, match="found this"):
        raise kind("found this")


def test_survives_a_process_boundary() -> None:
    error = errors.LabError("the run stopped", remedy="lower the rate", where="step 3")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.remedy == error.remedy
