"""Grammars that an answer must obey: which tokens may come next.

matching    a grammar as a `params.Constraint`    json_schema   schemas as grammars
reasoning   grammars that begin after the reasoning, or with a token
gbnf/       llama.cpp's grammar format
"""
