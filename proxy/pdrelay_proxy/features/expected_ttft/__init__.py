"""A policy that minimises the expected TTFT, by measured legs: docs/expected-ttft.md."""
