"""Drafters: each guesses tokens from what is certain. They import no llama.cpp."""
