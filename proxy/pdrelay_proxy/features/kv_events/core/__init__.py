"""The index of engines' caches, and the look-up of prompts in it: no clock, no socket."""
