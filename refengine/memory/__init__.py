"""What a model remembers of a sequence: the KV cache and the recurrent state."""
