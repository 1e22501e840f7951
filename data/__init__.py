"""Text to token shards to rows; knows nothing of models."""
