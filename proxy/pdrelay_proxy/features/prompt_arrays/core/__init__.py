"""Which requests have several prompts, and how their answers become one."""
