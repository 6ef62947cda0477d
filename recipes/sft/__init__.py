"""Supervised fine-tuning: one trainer and the ranks of one model."""
