"""From logits to tokens that follow the target's distribution, drafted or not.

    chain     a sequence's sampling chain        filters, penalties, rows   llama.cpp's samplers
    noise     random numbers by seed and place   logprobs                   what was likely
    verify    lossless acceptance of a draft

Pure functions of arrays: no llama.cpp, no text, no drafter.
"""
