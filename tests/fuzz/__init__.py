"""Damaged and hostile input of every kind: one line comes of it, quickly, in little memory, and never a traceback."""
