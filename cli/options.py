"""The options that several commands share, written down once.

A command takes one dataclass per group (see `spread`). Names that
llama.cpp uses are accepted as aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .placement_options import PlacementArgs
from .text_files import read_text

if TYPE_CHECKING:
    from ..loading.loader import LoadOptions
    from ..params import SamplingParams


@dataclass(frozen=True)
class ModelArgs:
    """Which model, and how to run it."""

    model: Annotated[
        Path | None,
        typer.Argument(
            help="GGUF file to load. Default: the embedded demo model.", show_default=False
        ),
    ] = None
    ctx: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx",
            "--ctx-size",
            help="Context size in tokens; 0: the model's context size, at most 8192.",
        ),
    ] = 0
    threads: Annotated[
        int, typer.Option("-t", "--threads", help="Number of threads; 0: one per physical core.")
    ] = 0
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            metavar="NAMES",
            help="auto, off, or drafters in order of preference: ngram (copies), mtp, model.",
        ),
    ] = "auto"
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "--draft-model",
            "--model-draft",
            metavar="FILE",
            help="Smaller model with the same vocabulary, or a file with the model's MTP block. "
            "Default: an mtp-*.gguf file in the model's folder, if there is one.",
            show_default=False,
        ),
    ] = None
    draft_max: Annotated[
        int | None,
        typer.Option(
            "--draft-max",
            "--spec-draft-n-max",
            help="Maximum number of tokens to draft at once; 0: off. Default: 8, or the drafter's "
            "block size; 3 for DeepSeek-V4.",
            show_default=False,
        ),
    ] = None
    ngram_max: Annotated[
        int,
        typer.Option("--ngram-max", help="Maximum number of tokens to copy at once."),
    ] = 48
    draft_min: Annotated[
        int,
        typer.Option(
            "--draft-min",
            "--spec-draft-n-min",
            help="Minimum number of tokens to draft at once; equal to --draft-max: a fixed depth.",
        ),
    ] = 0
    draft_p_min: Annotated[
        float,
        typer.Option(
            "--draft-p-min",
            "--spec-draft-p-min",
            help="Minimum confidence to continue a draft.",
        ),
    ] = 0.0
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Same text at any draft depth: F32 KV cache, no flash attention, 1 thread.",
        ),
    ] = False

    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            metavar="TEXT",
            help="Chat template to use instead of the model's own, in Jinja.",
            show_default=False,
        ),
    ] = None
    chat_template_file: Annotated[
        Path | None,
        typer.Option(
            "--chat-template-file",
            metavar="FILE",
            help="File with the chat template to use.",
            show_default=False,
        ),
    ] = None
    parse_special_content: Annotated[
        bool,
        typer.Option(
            "--parse-special-content",
            help="Let messages name control tokens, such as <|im_end|>; they are text otherwise.",
        ),
    ] = False

    def load_options(self, placement_args: PlacementArgs | None = None) -> LoadOptions:
        """Raises `RequestError` for values out of range."""
        from platformdirs import user_cache_dir

        from ..loading.loader import LoadOptions

        return LoadOptions(
            n_ctx=self.ctx,
            n_threads=self.threads,
            placement=(placement_args or PlacementArgs()).placement(),
            draft=self.draft,
            draft_model=self.draft_model,
            draft_min=self.draft_min,
            draft_max=self.draft_max,
            ngram_max=self.ngram_max,
            draft_p_min=self.draft_p_min,
            memory=Path(user_cache_dir("gguf-mtp")) / "depth",
            strict=self.strict,
            chat_template=self._chat_template(),
            parse_special_content=self.parse_special_content,
        )

    def _chat_template(self) -> str | None:
        """Raises `RequestError` for a file that cannot be read, and for two templates."""
        from ..errors import RequestError

        text, file = self.chat_template, self.chat_template_file
        if file is None:
            return text
        if text is not None:
            raise RequestError("--chat-template and --chat-template-file cannot be combined")
        return read_text(file)


@dataclass(frozen=True)
class SamplingArgs:
    """How to draw tokens. What is not given comes from the model file, then from llama.cpp."""

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
            "Default: penalties;top_k;typ_p;top_p;min_p;temperature.",
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
