"""Prompts, answers and the small embedded target: what training and inference read."""
