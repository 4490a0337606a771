"""Checkpoints that were downloaded already: the local cache of the Hugging Face hub's tools. Only read.

    ~/.cache/huggingface/hub/models--canopylabs--orpheus-3b-0.1-ft/refs/main         a commit
                                                                  /snapshots/<commit>/   its files

Nothing is downloaded. Where the cache is, says who calls: the environment is read elsewhere.
"""

from pathlib import Path


def snapshot(cache: Path, repository: str) -> Path | None:
    """The folder with the files of the repository's `main`, as downloaded last; None: not there."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        found = folder / "snapshots" / commit
        return found if commit and found.is_dir() else None
    except (OSError, UnicodeDecodeError, ValueError):  # not there, or nothing that the hub's tools wrote
        return None
