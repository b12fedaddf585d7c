"""The options that several commands share, written down once.

A command takes one dataclass per group (see `spread`). Names that
llama.cpp uses are accepted as aliases.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from .placement_options import PlacementArgs
from .text_files import read_text

if TYPE_CHECKING:
    from ..loading.loader import LoadOptions


DRAFTING = "Drafting"


@dataclass(frozen=True)
class ModelArgs:
    """Which model, and how to run it."""

    PANEL: ClassVar[str] = "Model"

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
            rich_help_panel=DRAFTING,
            help="auto, off, or drafters in order of preference: ngram (copies), mtp, dspark, "
            "model.",
        ),
    ] = "auto"
    draft_model: Annotated[
        Path | None,
        typer.Option(
            "--draft-model",
            "--model-draft",
            metavar="FILE",
            rich_help_panel=DRAFTING,
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
            rich_help_panel=DRAFTING,
            help="Maximum number of tokens to draft at once; 0: off. Default: 8, or the drafter's "
            "block size; 3 for DeepSeek-V4.",
            show_default=False,
        ),
    ] = None
    ngram_max: Annotated[
        int,
        typer.Option(
            "--ngram-max",
            rich_help_panel=DRAFTING,
            help="Maximum number of tokens to copy at once.",
        ),
    ] = 48
    draft_min: Annotated[
        int,
        typer.Option(
            "--draft-min",
            "--spec-draft-n-min",
            rich_help_panel=DRAFTING,
            help="Minimum number of tokens to draft at once; equal to --draft-max: a fixed depth.",
        ),
    ] = 0
    draft_p_min: Annotated[
        float,
        typer.Option(
            "--draft-p-min",
            "--spec-draft-p-min",
            rich_help_panel=DRAFTING,
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
