"""Turning checkpoints into GGUF files. Knows nothing of the run time."""
