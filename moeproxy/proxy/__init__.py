"""Choose representative experts and write the proxy checkpoint."""
