"""What the worker processes of one router share: a folder, a port, and a word to each other now and then."""
