"""Measures releases: bound, speed, samples; uses data and models, never training."""
