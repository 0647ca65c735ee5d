"""What a panel is opened with: a checkpoint and a profile that belong together."""

from __future__ import annotations

from pathlib import Path

from moeproxy.errors import ProfileError
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.profile import ExpertProfile


def open_profiled(checkpoint: Checkpoint | str | Path, profile: ExpertProfile) -> Checkpoint:
    """Return the checkpoint, opened, once it is clear that `profile` describes it.

    Raises:
        CheckpointError: the directory is no usable MoE checkpoint.
        ProfileError: the profile was made from another checkpoint.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.open(checkpoint)
    if profile.checkpoint_fingerprint != opened.fingerprint:
        raise ProfileError(
            "the profile was made from another checkpoint (fingerprints differ)",
            expected=f"a profile of {opened.fingerprint[:12]}, got one of {profile.checkpoint_fingerprint[:12]}",
            remedy="profile this checkpoint, or open the one that the profile was made from",
            where=opened.path,
        )
    return opened
