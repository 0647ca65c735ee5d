"""The type checker that jaxtyping's import hook puts on the package while tests run (pyproject.toml)."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

# An int is a float here, as for static checkers.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
