"""vLLM's API: bodies, streams, errors, and which requests can be disaggregated."""
