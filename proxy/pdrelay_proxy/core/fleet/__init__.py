"""The engines: what each is, how it is, and how it comes and goes."""
