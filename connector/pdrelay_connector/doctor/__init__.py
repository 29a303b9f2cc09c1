"""``pdrelay doctor``: measures the network between two machines as engines use it (docs/doctor.md).

It loads neither vLLM nor, for memory of the host, torch.
"""
