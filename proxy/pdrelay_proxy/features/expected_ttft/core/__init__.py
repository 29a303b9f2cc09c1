"""What was measured of engines, what a request would take there, and the choice by that: no clock,
no socket.
"""
