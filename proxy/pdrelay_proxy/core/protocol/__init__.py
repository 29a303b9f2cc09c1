"""What vLLM's API says and wants: bodies, streams, errors, and which requests can be
disaggregated.
"""
