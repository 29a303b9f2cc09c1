"""Engines that are pods of a Kubernetes cluster: of a label selector, or of an InferencePool."""
