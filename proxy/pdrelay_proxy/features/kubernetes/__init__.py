"""The Kubernetes API, for other features: its objects are listed, watched and patched."""
