"""Errors that tell the reader what was found, what was expected and what to change."""

from __future__ import annotations

from pathlib import Path


class MoeproxyError(ValueError):
    """Base of every error that moeproxy raises on purpose.

    Args:
        found: what is wrong, in one clause.
        expected: what would have been right.
        remedy: what the reader should change.
        where: the file, layer, fault or step concerned.
    """

    def __init__(self, found: str, *, expected: str = "", remedy: str = "", where: str | Path = "") -> None:
        self.found, self.expected, self.remedy, self.where = found, expected, remedy, str(where)
        super().__init__(self._text())

    def _text(self) -> str:
        head = f"{self.where}: {self.found}" if self.where else self.found
        parts = [head]
        if self.expected:
            parts.append(f"Expected: {self.expected}.")
        if self.remedy:
            parts.append(f"What to do: {self.remedy}.")
        return parts[0] if len(parts) == 1 else ". ".join([parts[0].rstrip("."), " ".join(parts[1:])])


class CheckpointError(MoeproxyError):
    """A directory is no usable MoE checkpoint."""


class ProfileError(MoeproxyError):
    """A calibration pass failed or a saved profile is unusable."""


class ProxyError(MoeproxyError):
    """A proxy cannot be chosen, written or verified."""


class FaultError(MoeproxyError):
    """A fault is unknown or asked for with impossible settings."""


class LabError(MoeproxyError):
    """A training run cannot be started or did not finish."""


class TraceError(MoeproxyError):
    """A trace file or a set of traces is unusable."""


class ComparisonError(MoeproxyError):
    """Traces cannot be compared."""


class RecoveryError(MoeproxyError):
    """A job cannot recover from a fault, or what it left behind cannot be judged."""


class ScaleError(MoeproxyError):
    """A cluster cannot be emulated as asked for, or the emulation did not finish."""
