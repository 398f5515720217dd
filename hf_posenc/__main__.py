"""The command line: `hf-posenc`, or `python -m hf_posenc`."""

import sys

from hf_posenc.errors import MissingPackageError, require_recipes


def main() -> None:
    try:
        require_recipes()
    except MissingPackageError as error:
        sys.exit(f"hf-posenc: {error}")
    from hf_posenc.cli import app

    app()


if __name__ == "__main__":
    main()
