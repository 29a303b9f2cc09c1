"""The Kubernetes API, for features: its objects are listed, watched and patched."""
