"""Open a Mixture-of-Experts checkpoint and see how it uses its experts."""
