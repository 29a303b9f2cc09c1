"""What every request touches outside the cores: the clock of the fleet, random names, work that can
wait.
"""
