"""What a panel is opened with: a checkpoint and a profile that belong together."""

from __future__ import annotations

from pathlib import Path

from moeproxy.experts.belongs import check_profile
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import ExpertProfile


def open_profiled(checkpoint: Checkpoint | str | Path, profile: ExpertProfile) -> Checkpoint:
    """Return the checkpoint, opened, once it is clear that `profile` describes it.

    Raises:
        CheckpointError: the directory is no usable MoE checkpoint.
        ProfileError: the profile was made from another checkpoint.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    check_profile(profile, opened)
    return opened
