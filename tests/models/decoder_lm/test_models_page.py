"""docs/models.md lists the same architectures as the tests."""

from tests.models.decoder_lm import models_page
from tests.models.decoder_lm.refused import REFUSED
from tests.tiny import MODELS


def test_the_tables_are_what_the_generator_writes() -> None:
    shown = models_page.PAGE.read_text(encoding="utf-8")

    assert models_page.page(shown) == shown, "run make fix"
    assert models_page.proven() in shown
    assert models_page.refused() in shown


def test_every_tested_architecture_is_listed() -> None:
    proven, refused = models_page.proven(), models_page.refused()

    assert all(
        f"| `{model.architecture}` | `" in proven and model.proves in proven for model in MODELS.values()
    )
    assert all(one.architecture in refused for one in REFUSED if one.architecture)
