"""What is known of a model before it is loaded: from GGUF headers, no weights read.

header     bytes -> metadata and tensor places (over cursor, ggml_types)
metadata   header -> `ModelFacts`, refusing in words what llama.cpp would abort on (hparams,
           and by architecture deepseek2, deepseek32, nextn)
sidefile   does an MTP block belong to a model       vocabularies   do two models share one
traffic    bytes that decoding reads
"""
