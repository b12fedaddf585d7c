"""The engine: one loop over all sequences, tokens in and tokens out.

`engine.Engine` is the loop; its parts are files of their own. It knows no text, no llama.cpp and no
drafter by name.
"""
