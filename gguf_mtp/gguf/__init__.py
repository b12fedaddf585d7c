"""What is known of a model before it is loaded: from GGUF headers, no weights read.

header, cursor, ggml_types   bytes -> metadata and where tensors are
model_facts, hparams         header -> `ModelFacts`; refuses what llama.cpp would abort on
arch/                        what single architectures require
side_file, vocabularies      does an MTP block, or a draft model, belong to a model?
cache_layout                 what each layer keeps in the cache: rows, or a recurrent state
bytes_per_token              bytes that decoding reads
"""
