"""`python -m centella`: the command line, where its script is not on the PATH."""

from __future__ import annotations

from centella.cli import main

if __name__ == "__main__":
    main()
