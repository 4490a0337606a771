"""The token program `apd`: refusals of requests and of verifiers."""

from typing import Any

import pytest

from models.checkpoints.files import CheckpointError
from models.diffusion_text.apd_options import APD
from models.diffusion_text.node import DiffusionLM
from models.masked_diffusion.nodes import load
from models.programs import TokenRequest
from models.sequence_request import SamplingParams
from shared.errors import ClientError
from tests.tiny import tiny_checkpoint
from tests.tiny.block_diffusion import tiny_verifier
from tests.tiny.masked_diffusion import tiny_dream


def start(node: DiffusionLM, **options: Any) -> None:
    request = TokenRequest(
        prompt_ids=[10, 11],
        prefix_ids=[],
        max_tokens=4,
        end_ids=frozenset(),
        sampling=SamplingParams(),
        options={"apd": True} | options,
        seed=0,
        choice=0,
    )
    node.token_programs[APD](node, request)


def test_a_request_without_a_verifier_is_refused_by_name() -> None:
    node = load(tiny_dream(), dtype="float32")

    with pytest.raises(ClientError, match="this deployment has no verifier"):
        start(node)


def test_both_weights_exclude_one_another() -> None:
    node = load(tiny_dream(), dtype="float32", kwargs={"verifier": str(tiny_verifier())})
    start(node, apd_mixture_weight=0.7)

    with pytest.raises(ClientError, match="expected one of them"):
        start(node, apd_mixture_weight=0.7, apd_verifier_weight=0.3)


def test_a_verifier_of_another_vocabulary_is_refused_at_load() -> None:
    with pytest.raises(CheckpointError, match="has another vocabulary"):
        load(tiny_dream(), dtype="float32", kwargs={"verifier": str(tiny_checkpoint("gemma"))})
