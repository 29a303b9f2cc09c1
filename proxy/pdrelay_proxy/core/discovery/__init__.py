"""Compares the engines that sources name with those that are there: the difference is the change to
make.
"""
