"""Where routers keep the engines that operators add: a file, a ConfigMap or Redis."""
