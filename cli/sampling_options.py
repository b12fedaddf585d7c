"""Options that say how tokens are drawn, by llama.cpp's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

if TYPE_CHECKING:
    from ..params import SamplingParams

__all__ = ["SamplingArgs"]


@dataclass(frozen=True)
class SamplingArgs:
    """How to draw tokens. What is not given comes from the model file, then from llama.cpp."""

    PANEL: ClassVar[str] = "Sampling"

    max_tokens: Annotated[
        int,
        typer.Option(
            "-n",
            "--max-tokens",
            "--predict",
            "--n-predict",
            help="Maximum number of tokens in an answer; -1: as many as fit in the context.",
        ),
    ] = -1
    temp: Annotated[
        float | None,
        typer.Option("--temp", "--temperature", help="Temperature; 0: greedy.", show_default=False),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", help="Keep the K most likely tokens; 0: off.", show_default=False),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Keep the most likely tokens up to a total probability of P; 1: off.",
            show_default=False,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p",
            help="Keep tokens with at least P times the probability of the most likely; 0: off.",
            show_default=False,
        ),
    ] = None
    typical_p: Annotated[
        float | None,
        typer.Option(
            "--typical",
            "--typical-p",
            help="Keep the most typical tokens up to a total probability of P; 1: off.",
            show_default=False,
        ),
    ] = None
    repeat_penalty: Annotated[
        float | None,
        typer.Option(
            "--repeat-penalty",
            help="Divide the logits of repeated tokens by this factor; 1: off.",
            show_default=False,
        ),
    ] = None
    repeat_last_n: Annotated[
        int | None,
        typer.Option(
            "--repeat-last-n",
            help="Number of last tokens that the penalties consider; 0: off, -1: all.",
            show_default=False,
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty",
            help="Penalty for tokens that have already appeared; 0: off.",
            show_default=False,
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            help="Penalty for each time a token has appeared; 0: off.",
            show_default=False,
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "-l",
            "--logit-bias",
            metavar="ID(+/-)BIAS",
            help="Add a bias to a token's logit, such as 15043+1 or 15043-inf; repeatable.",
            show_default=False,
        ),
    ] = None
    samplers: Annotated[
        str | None,
        typer.Option(
            "--samplers",
            metavar="A;B;...",
            help="Samplers to use, in this order. "
            "Default: penalties, top_k, typ_p, top_p, min_p, temperature.",
            show_default=False,
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            "-s", "--seed", help="Random seed: fixes the text; -1: a different seed every time."
        ),
    ] = -1

    @property
    def n_max(self) -> int:
        """The bound as a number; -1 stands for as many as fit."""
        from ..params import AS_MANY_AS_FIT

        return AS_MANY_AS_FIT if self.max_tokens == -1 else self.max_tokens

    def given(self) -> dict[str, Any]:
        """What was given on the command line, by the names of `SamplingParams`.

        Raises `RequestError` for a bias or a sampler that cannot be read.
        """
        from ..params import bias_of, sampler_order

        given = {
            "temperature": self.temp,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repeat_penalty": self.repeat_penalty,
            "repeat_last_n": self.repeat_last_n,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": tuple(map(bias_of, self.logit_bias)) if self.logit_bias else None,
            "samplers": None if self.samplers is None else sampler_order(self.samplers),
            "seed": None if self.seed == -1 else self.seed,
        }
        return {name: value for name, value in given.items() if value is not None}

    def fields(self) -> dict[str, Any]:
        """`given`, as a request to a server has it: JSON knows no infinity, and `false` bans."""
        fields = self.given()
        if biases := fields.get("logit_bias"):
            fields["logit_bias"] = [[t, b if b > float("-inf") else False] for t, b in biases]
        return fields

    def over(self, defaults: SamplingParams, n_vocab: int) -> SamplingParams:
        """`defaults` with what was given on the command line. Raises `RequestError` for what no
        request could be answered with by a model of `n_vocab` tokens."""
        import dataclasses

        from ..errors import RequestError

        if self.max_tokens < 1 and self.max_tokens != -1:
            raise RequestError(
                f"-n is {self.max_tokens}, but must be 1 or more, or -1 (as many as fit)"
            )
        if self.seed is not None and self.seed < -1:
            raise RequestError(f"--seed is {self.seed}, but must be 0 or more, or -1 (a new one)")
        params = dataclasses.replace(defaults, **self.given())
        params.check_vocabulary(n_vocab)
        return params
