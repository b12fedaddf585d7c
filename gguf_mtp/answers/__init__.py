"""From a request to an answer: what `Session`, the commands and the server do alike.

It knows neither HTTP nor a terminal.
"""
