"""One module an architecture: what the pinned llama.cpp requires of its files."""
