"""The division of an item's values into texts."""

import torch

from models.text_encoder.items import divided


def test_values_are_divided_in_order() -> None:
    assert divided(torch.arange(5), torch.tensor([2, 0, 3])) == [[0, 1], [], [2, 3, 4]]


def test_no_texts_have_no_values() -> None:
    assert divided(torch.arange(0), torch.arange(0)) == []
