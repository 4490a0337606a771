import pytest

from configs.demo.collect import first_sentence


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return the sum. Then more.\n\nAnd more.", "Return the sum."),
        ("Return the final component of\n    a pathname", "Return the final component of a pathname"),
        ("Convert a time, e.g. noon, to text.", "Convert a time, e.g. noon, to text."),
        ("make an iterator\n\n  of\n    Things.", "make an iterator"),
        ("Serialize ``obj`` to text.", "Serialize obj to text."),
        ("range(a) -> range object\nrange(a, b) -> object\n\nReturn numbers. All.", "Return numbers."),
        ("map(f, *its) --> map object\n\nMake an iterator of results.", "Make an iterator of results."),
        ("D.pop(k[,d]) -> v, remove the key and return the value.\n\nOr raise KeyError.",
         "D.pop(k[,d]) -> v, remove the key and return the value."),
        ("D.update([E, ]**F) -> None.  Update D from E and F.\nIf E has keys, so.", "Update D from E and F."),
        ("dict() -> new empty dictionary\ndict(mapping) -> new dictionary", "dict() -> new empty dictionary"),
    ],
)  # fmt: skip
def test_the_first_sentence_of_prose_is_taken(docstring: str, sentence: str) -> None:
    assert first_sentence(docstring) == sentence


@pytest.mark.parametrize(
    "docstring", ["", "x", "Use `that`.", "Sum (of.", "x.f(y) <==> y in x.", "Ä is not plain ASCII."]
)
def test_a_docstring_without_a_clean_sentence_is_left_out(docstring: str) -> None:
    assert first_sentence(docstring) is None


def test_a_sentence_too_long_to_learn_is_left_out() -> None:
    assert first_sentence("Very " * 40 + "long.") is None
