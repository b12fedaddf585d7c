"""Every error this package raises on purpose.

    GgufMtpError                   one clear sentence; the command line prints it and exits 1
    ├── ModelError                 a model file that cannot be used
    │   ├── UnsupportedModel       a sound file that this run time cannot run (or cannot draft with)
    │   └── LoadFailed             not a GGUF, damaged, unreadable, or refused by llama.cpp
    ├── RequestError               a parameter out of range, an empty prompt
    │   ├── ContextFull            the prompt does not fit the context
    │   └── UnknownModel           it names another model than the one that is served
    ├── Unavailable                the server cannot take a request, or will not finish it
    ├── DecodeError                llama_decode failed; carries its code
    ├── BadLogits                  the target computed logits that are no numbers
    ├── SavedStateError            a saved sequence that is damaged or belongs to another model
    ├── CannotRewind               a KV cache refused to drop its last rows; nothing was changed
    └── ConversionError            a checkpoint that cannot be converted; names the file or tensor

A message is one sentence with the value, the file or the tensor in it. This module imports nothing.
"""

from __future__ import annotations


class GgufMtpError(Exception):
    """Base of every error raised on purpose."""


class ModelError(GgufMtpError):
    """A model file that cannot be used."""


class UnsupportedModel(ModelError):
    """A sound file that this run time cannot run, or cannot draft with."""


class LoadFailed(ModelError):
    """Not a GGUF, damaged, unreadable, or refused by llama.cpp."""


class RequestError(GgufMtpError):
    """A request that makes no sense: a parameter out of range, an empty prompt."""


class ContextFull(RequestError):
    """The prompt does not fit the context. `is_least`: it was not tokenised, as it cannot be fewer
    tokens than `n_prompt`."""

    def __init__(self, n_prompt: int, n_ctx: int, is_least: bool = False) -> None:
        least = "at least " if is_least else ""
        super().__init__(
            f"the prompt has {least}{n_prompt} tokens, but the context holds {n_ctx} "
            "and one must stay free for the answer; raise -c or shorten the prompt"
        )
        self.n_prompt, self.n_ctx, self.is_least = n_prompt, n_ctx, is_least


class UnknownModel(RequestError):
    """A request names another model than the one that is served."""

    def __init__(self, name: str) -> None:
        super().__init__(f"this server has no model {name!r}")


class Unavailable(GgufMtpError):
    """The server cannot take a request now, or will not finish it."""


NO_CELLS = 1
"""What llama_decode returns when the KV cache has no room for the batch; nothing was stored."""


class DecodeError(GgufMtpError):
    """`llama_decode` failed with `code`: `NO_CELLS`, -1 a refused batch, others a failed pass."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} (llama_decode returned {code})")
        self.code = code


class BadLogits(GgufMtpError):
    """The target computed NaN or infinite logits for the token at `position` of its sequence."""

    def __init__(self, position: int, value: float) -> None:
        super().__init__(
            f"the model computed {value} as a logit of the token at position {position}: its file "
            "is damaged, or its values overflow on this device"
        )
        self.position = position


class CannotRewind(GgufMtpError):
    """A KV cache refused to drop its last rows; nothing was changed."""


class SavedStateError(GgufMtpError):
    """A saved sequence that is damaged, or belongs to another model or other settings."""


class ConversionError(GgufMtpError):
    """A checkpoint that cannot be converted; the message names the file or the tensor."""
