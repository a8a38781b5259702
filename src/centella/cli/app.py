"""The subcommands, their options and their help. Typer reads annotations when a command is made."""

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from centella.errors import CentellaError

if TYPE_CHECKING:
    import typer

DEVICE = "cpu, webgpu, webgpu:N, webgpu:WORD, cuda, cuda:N or simulator (default: the best here)."
MODEL = "minilm, a model folder, or a repository of huggingface.co."


def _help(what: str, *examples: str) -> str:
    """The help of a command; the backspace tells click to keep the lines that follow."""
    return "\n".join([what, "", "\b", "Examples:", *(f"  {line}" for line in examples)])


class Target(StrEnum):
    """What `centella kernels` prints."""

    wgsl = "wgsl"
    ptx = "ptx"
    ir = "ir"


def build() -> "typer.Typer":
    """The Typer application."""
    import typer

    app = typer.Typer(
        cls=_group(),
        help="Transformers on the GPU you have. Try: centella demo",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    _add_options(app)
    _add_info(app)
    _add_embed(app)
    _add_kernels(app)
    _add_demo(app)
    return app


def _group() -> Any:
    import typer
    from typer.core import TyperGroup

    class Commands(TyperGroup):
        """Prints an error of the library in one line; with --debug it is raised."""

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # the reader of our output has left: Typer ends quietly
                raise
            except (CentellaError, OSError) as error:
                if ctx.params.get("debug"):
                    raise
                typer.echo(f"centella: {error}", err=True)
                raise typer.Exit(1) from None

    return Commands


def _add_options(app: "typer.Typer") -> None:
    import typer

    def show_version(wanted: bool) -> None:
        if wanted:
            from centella import __version__

            typer.echo(f"centella {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        debug: Annotated[
            bool, typer.Option("--debug", help="Show the library's log, and tracebacks.")
        ] = False,
        version: Annotated[
            bool,
            typer.Option("--version", callback=show_version, is_eager=True, help="Show it, exit."),
        ] = False,
    ) -> None:
        if debug:
            logging.basicConfig(level=logging.WARNING)
            logging.getLogger("centella").setLevel(logging.DEBUG)


def _add_info(app: "typer.Typer") -> None:
    import typer

    @app.command(
        short_help="Show devices, versions and extras.",
        help=_help(
            "Show versions, devices, the default device and why, and the installed extras.",
            "centella info",
            "centella info --json",
            "CENTELLA_DEVICE=webgpu:0 centella info",
        ),
    )
    def info(
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        from centella.cli.info import run

        run(as_json)


def _add_embed(app: "typer.Typer") -> None:
    import typer

    @app.command(
        help=_help(
            "Embed texts as unit vectors.",
            "centella embed 'data stays on the device' 'a cat on a mat'",
            "centella embed --file lines.txt --output vectors.npy",
            "sort names.txt | centella embed --file - --json",
            "centella embed hello --device webgpu --ledger",
        )
    )
    def embed(
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help="Texts to embed.")
        ] = None,
        file: Annotated[
            str | None, typer.Option("--file", metavar="F", help="One text a line; - for stdin.")
        ] = None,
        model: Annotated[str, typer.Option(metavar="DIR", help=MODEL)] = "minilm",
        device: Annotated[str | None, typer.Option(metavar="D", help=DEVICE)] = None,
        dtype: Annotated[str, typer.Option(metavar="T", help="auto, f32, f16 or bf16.")] = "auto",
        batch_size: Annotated[
            int, typer.Option(min=1, metavar="N", help="Texts in one batch.")
        ] = 32,
        as_json: Annotated[bool, typer.Option("--json", help="Print text and embedding.")] = False,
        output: Annotated[
            str | None, typer.Option(metavar="F.npy", help="Save the array [texts, dim].")
        ] = None,
        ledger: Annotated[
            bool, typer.Option("--ledger", help="Show what moved and ran (on stderr).")
        ] = False,
    ) -> None:
        from centella.cli.embed import run

        run(
            text or [],
            file,
            model=model,
            device=device,
            dtype=dtype,
            batch_size=batch_size,
            as_json=as_json,
            output=output,
            show_ledger=ledger,
        )


def _add_kernels(app: "typer.Typer") -> None:
    import typer

    @app.command(
        short_help="List kernels, or print the source of one.",
        help=_help(
            "List the library's kernels, or print the source of one (f32, a usual shape).",
            "centella kernels",
            "centella kernels softmax",
            "centella kernels linear --target ptx --arch sm_90a",
        ),
    )
    def kernels(
        name: Annotated[
            str | None, typer.Argument(metavar="NAME", help="A kernel; without: list them.")
        ] = None,
        target: Annotated[Target, typer.Option(help="What to print.")] = Target.wgsl,
        arch: Annotated[str, typer.Option(metavar="A", help="PTX target.")] = "sm_80",
    ) -> None:
        from centella.cli.kernels import run

        run(name, target.value, arch)


def _add_demo(app: "typer.Typer") -> None:
    import typer

    from centella.cli.demo import QUESTION

    @app.command(
        short_help="Search text files by meaning.",
        help=_help(
            "Search text files by meaning: yours, or centella's own documentation.",
            "centella demo",
            "centella demo 'how is memory freed?'",
            "centella demo 'where do we parse dates?' --over src/",
        ),
    )
    def demo(
        question: Annotated[
            str, typer.Argument(metavar="QUESTION", help="What to look for.")
        ] = QUESTION,
        over: Annotated[
            str | None,
            typer.Option(metavar="PATH", help="A folder or file (.txt .md .rst .py)."),
        ] = None,
        model: Annotated[str, typer.Option(metavar="DIR", help=MODEL)] = "minilm",
        device: Annotated[str | None, typer.Option(metavar="D", help=DEVICE)] = None,
    ) -> None:
        from centella.cli.demo import run

        run(question, over, model=model, device=device)
