"""The forms an answer may be bound to: what tokens may come next.

matching      a grammar as a `params.Constraint`    json_schema   schemas as grammars
following     when it begins, when an answer ends   gbnf*         llama.cpp's grammar format
"""
