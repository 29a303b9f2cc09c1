"""Sessions of ``/v1/realtime``."""
