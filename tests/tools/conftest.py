"""What all tests of the tools share."""

from support.certificates import one_authority  # noqa: F401 (a fixture of every test)
