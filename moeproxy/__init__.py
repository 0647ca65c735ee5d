"""Proxy models for diagnosing reinforcement-learning failures of Mixture-of-Experts language models.

    checkpoint = moeproxy.Checkpoint.open("model")          # reads the index only, loads no weights
    profile = moeproxy.profile(checkpoint, prompts)         # how the model uses its experts
    plan = moeproxy.select(profile, n_keep=16)              # which experts represent the others
    proxy = moeproxy.build(checkpoint, plan, "model-16")    # a checkpoint of its own, checked by reload
    result = moeproxy.compare(traces, "update_freeze", ...)  # does the proxy show the same failure?

Array names carry their axes as a suffix, `load_LE` being layers x experts:
L layer, E expert, C cluster, K top-k, T token, D width, F expert width, B prompt, G sample, S step.

Public names are imported on first use, so `import moeproxy` loads neither torch nor NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeproxy.lazy import lazy_names

if TYPE_CHECKING:
    from moeproxy.errors import MoeproxyError
    from moeproxy.experts.checkpoint import Checkpoint
    from moeproxy.experts.profile import profile
    from moeproxy.experts.statistics import ExpertProfile
    from moeproxy.proxy.build import Proxy, build, check
    from moeproxy.proxy.cluster import KeepPlan, allowed_counts, select
    from moeproxy.proxy.cost import cost
    from moeproxy.proxy.damage import damage
    from moeproxy.proxy.fidelity import fidelity
    from moeproxy.proxy.stability import stability
    from moeproxy.traces.trace import RunInfo, Trace, load_dir
    from moeproxy.triage.compare import Comparison, compare, compare_all

_HOMES = {
    "moeproxy.errors": ("MoeproxyError",),
    "moeproxy.experts.checkpoint": ("Checkpoint",),
    "moeproxy.experts.profile": ("profile",),
    "moeproxy.experts.statistics": ("ExpertProfile",),
    "moeproxy.proxy.build": ("Proxy", "build", "check"),
    "moeproxy.proxy.cluster": ("KeepPlan", "allowed_counts", "select"),
    "moeproxy.proxy.cost": ("cost",),
    "moeproxy.proxy.damage": ("damage",),
    "moeproxy.proxy.fidelity": ("fidelity",),
    "moeproxy.proxy.stability": ("stability",),
    "moeproxy.traces.trace": ("RunInfo", "Trace", "load_dir"),
    "moeproxy.triage.compare": ("Comparison", "compare", "compare_all"),
}

__all__ = [
    "Checkpoint",
    "Comparison",
    "ExpertProfile",
    "KeepPlan",
    "MoeproxyError",
    "Proxy",
    "RunInfo",
    "Trace",
    "allowed_counts",
    "build",
    "check",
    "compare",
    "compare_all",
    "cost",
    "damage",
    "fidelity",
    "load_dir",
    "profile",
    "select",
    "stability",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
