"""A policy by what requests take at engines, as their legs have shown: docs/expected-ttft.md."""
