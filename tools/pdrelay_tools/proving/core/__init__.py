"""Questions, answers and findings: pure functions, without a clock or a socket."""
