"""The local cache of the Hugging Face hub: lookup of downloaded checkpoints. Read only.

    ~/.cache/huggingface/hub/models--canopylabs--orpheus-3b-0.1-ft/refs/main         a commit
                                                                  /snapshots/<commit>/   its files

Nothing is downloaded. The caller passes the path of the cache; the environment is read elsewhere.
"""

from pathlib import Path


def snapshot(cache: Path, repository: str) -> Path | None:
    """The folder of the last download of the repository's branch `main`; None if there is none."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        found = folder / "snapshots" / commit
        return found if commit and found.is_dir() else None
    except (OSError, UnicodeDecodeError, ValueError):  # absent, or not written by the hub's tools
        return None
