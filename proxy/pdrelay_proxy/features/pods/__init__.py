"""Engines that are pods of a Kubernetes cluster: by a label selector, or those of an
InferencePool.
"""
