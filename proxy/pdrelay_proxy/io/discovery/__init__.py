"""Where the router learns of engines: Kubernetes, files, stores, operators."""
