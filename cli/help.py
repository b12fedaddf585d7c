"""How `--help` looks: everyday options first, one name each, the others on `--help-all`.

Options and their texts are with the commands; here is only which of them a first look leaves out,
the examples and the order of the commands.
"""

from __future__ import annotations

import copy
from typing import Any

from typer.core import TyperCommand, TyperOption

__all__ = ["EXAMPLES", "PANELS", "RARE", "Command"]

HELP_ALL = "--help-all"

PANELS = {
    "Run a model": ("chat", "run", "serve", "demo"),
    "Get a model": ("pull", "convert", "graft", "extract"),
    "Look and measure": ("inspect", "plan", "bench", "trace", "doctor"),
    "Several machines": ("worker",),
}
"""Commands in the order in which `gguf-mtp --help` lists them."""

RARE = frozenset(
    {
        "allow_thrash",
        "allowed_host",
        "chat_template",
        "chat_template_file",
        "cors_origin",
        "draft_min",
        "draft_ngl",
        "draft_p_min",
        "fit_margin",
        "frequency_penalty",
        "grace",
        "keep_alive",
        "kv_offload",
        "logit_bias",
        "main_gpu",
        "mlock",
        "mmap",
        "ngram_max",
        "op_offload",
        "override_tensor",
        "parse_special_content",
        "presence_penalty",
        "queue",
        "repeat_last_n",
        "samplers",
        "split_mode",
        "strict",
        "tensor_split",
        "trace",
        "trace_goes_on",
        "typical_p",
        "ubatch",
    }
)
"""Options that `--help` leaves out, by the names of their parameters."""

EXAMPLES = {
    "chat": ("gguf-mtp chat model.gguf", "gguf-mtp chat --server http://127.0.0.1:8080"),
    "run": (
        'gguf-mtp run model.gguf -p "Why is the sky blue?"',
        'cat notes.txt | gguf-mtp run model.gguf -p "Summarise this."',
    ),
    "serve": (
        "gguf-mtp serve model.gguf --port 8080",
        "gguf-mtp serve model.gguf --parallel 4 --host 0.0.0.0 --api-key SECRET",
    ),
    "demo": ("gguf-mtp demo", "gguf-mtp demo --questions 6"),
    "pull": ("gguf-mtp pull owner/name:Q4_K_M", "gguf-mtp pull owner/name:Q8_0 -o models"),
    "convert": (
        "gguf-mtp convert DeepSeek-V3.1 --type q4_k_m",
        "gguf-mtp convert owner/name --mtp only -o mtp-model.gguf",
    ),
    "graft": (
        "gguf-mtp graft model.gguf mtp-model.gguf -o with-mtp.gguf",
        "gguf-mtp graft model.gguf DeepSeek-V3.1 -o with-mtp.gguf",
    ),
    "extract": ("gguf-mtp extract with-mtp.gguf -o mtp-model.gguf",),
    "inspect": ("gguf-mtp inspect model.gguf", "gguf-mtp inspect model.gguf --json"),
    "plan": (
        "gguf-mtp plan model.gguf --vram 24G",
        "gguf-mtp plan --config config.json --vram 24G,24G --ram 512G",
    ),
    "bench": (
        "gguf-mtp bench model.gguf",
        "gguf-mtp bench model.gguf --workloads facts --temps 0",
    ),
    "trace": ("gguf-mtp trace model.gguf",),
    "doctor": ("gguf-mtp doctor", "gguf-mtp doctor --json"),
    "worker": ("gguf-mtp worker --port 50052",),
}


class Command(TyperCommand):
    """A command with `--help-all` and examples."""

    def __init__(self, name: str | None = None, **settings: Any) -> None:
        lines = ["Examples:", *(f"  {line}" for line in EXAMPLES.get(name or "", ()))]
        if any(p.name in RARE for p in settings.get("params") or ()):
            lines += ["", f"More options: gguf-mtp {name} {HELP_ALL}"]
        super().__init__(name, **settings | {"epilog": "\n".join(lines)})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if HELP_ALL in args:
            ctx.meta[HELP_ALL] = True
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        is_all = ctx.meta.get(HELP_ALL)
        shown = copy.copy(self)
        shown.params = [_short(p, ctx) for p in self.params if is_all or p.name not in RARE]
        TyperCommand.format_help(shown, ctx, formatter)


def _short(parameter: Any, ctx: Any) -> Any:
    """Without aliases: the short name and the first long one, `--[no-]name` where both say
    something; without the type of a switch, and the range of a number, which its refusal names."""
    one = copy.copy(parameter)
    if not isinstance(one, TyperOption):
        return one
    longs = [name for name in one.opts if name.startswith("--")]
    one.opts = [name for name in one.opts if name not in longs[1:]]
    if one.secondary_opts:
        one.opts = [f"--[no-]{longs[0].removeprefix('--')}"]
        one.secondary_opts = []
    if one.is_flag:
        one.metavar = ""
    elif one.min is not None or one.max is not None:
        one.metavar = str(one.display_type_rich(ctx)).replace(" range", "")
        one.min = one.max = None
    return one
