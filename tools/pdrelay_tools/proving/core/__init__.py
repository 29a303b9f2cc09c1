"""What is asked, what answers mean and what follows from them: pure, without a clock or a
socket.
"""
