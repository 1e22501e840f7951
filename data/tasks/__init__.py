"""Retrieval tasks made of tokens: prompts of exact length, the same for a key whoever asks, in whatever order."""
