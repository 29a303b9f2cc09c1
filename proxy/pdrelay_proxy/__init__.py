"""An OpenAI-compatible router for disaggregated vLLM engines."""
