"""Run RL, healthy or broken: testbed models, the two-engine GRPO loop, probes and faults."""
