"""GBNF, the grammar format of llama.cpp, read and written as the Lark of llguidance."""
