"""Judging traces: what a fault does to a run, and whether a proxy shows the same."""
