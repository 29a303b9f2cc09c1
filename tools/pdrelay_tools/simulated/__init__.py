"""A simulated vLLM engine, for tests, demonstrations and benchmarks without vLLM."""
