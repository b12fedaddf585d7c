"""The command line: `gguf-mtp`."""
