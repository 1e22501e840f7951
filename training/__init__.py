"""The objective, the optimizer and the loop that pretrains a denoiser; uses data and models, never eval."""
