"""All figures: pure functions from results to `plotly.graph_objects.Figure`, no widgets, no statistics.

`describe(figure)` is its one-sentence text alternative, `data_table(figure)` the numbers behind it.
"""

from moeproxy.view.figures_experts import expert_load, keep_map, similarity_heatmap
from moeproxy.view.figures_fidelity import fidelity_figure as fidelity
from moeproxy.view.figures_fidelity import stability_figure as stability
from moeproxy.view.figures_models import cost_bars, method_comparison
from moeproxy.view.figures_overlay import overlay
from moeproxy.view.figures_scale import scale_figure as scale
from moeproxy.view.figures_study import confusion, cost_fidelity, retrieval, study_responses
from moeproxy.view.figures_verdict import agreement, response_heatmap
from moeproxy.view.style import data_table, describe

__all__ = [
    "agreement",
    "confusion",
    "cost_bars",
    "cost_fidelity",
    "data_table",
    "describe",
    "expert_load",
    "fidelity",
    "keep_map",
    "method_comparison",
    "overlay",
    "response_heatmap",
    "retrieval",
    "scale",
    "similarity_heatmap",
    "stability",
    "study_responses",
]
