"""Upload of a finished run to the hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from hf_posenc.errors import RecipeError
from hf_posenc.recipes.storage import MODEL, RECIPE

# The card has the recipe, without local paths.
_COMPANIONS = ("table.md", "perplexity.png")


def push(folder: Path, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload the model of a finished run, with its card, table and picture, in one commit.

    Repository and branch (`None` is the main one) are created if necessary. Return the URL of the commit; raise
    `RecipeError` if the run is not finished, or the hub refuses.
    """
    if not (folder / RECIPE).is_file():
        raise RecipeError(f"{folder} holds no run of a recipe. Give the folder that `hf-posenc train` wrote.")
    model = folder / MODEL
    if not model.is_dir():
        raise RecipeError(
            f"The run in {folder} is not finished. Go on with it first: hf-posenc resume {shlex.quote(str(folder))}"
        )
    files = {name: folder / name for name in _COMPANIONS if (folder / name).is_file()}
    files |= {path.relative_to(model).as_posix(): path for path in sorted(model.rglob("*")) if path.is_file()}
    api = HfApi()
    try:
        name = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(name).private:
            raise RecipeError("it is public already. Make it private on the hub, or choose another name.")
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        operations = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
        done = api.create_commit(name, operations, commit_message="Adapt with hf_posenc", revision=revision)
    except Exception as error:  # The HTTP library and its exceptions differ between versions of the client.
        words = " ".join(str(error).split()) or type(error).__name__
        raise RecipeError(f"Pushing to {repository} failed: {words}") from error
    return str(done.commit_url)
