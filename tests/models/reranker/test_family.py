"""The family: its claims, the settings of folders, and what a request must be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from configs.checks import resolve
from models import registry
from models.checkpoints.files import CheckpointError
from models.reranker import folder, nodes, processing
from models.reranker.graph import GRAPH
from models.text_encoder.requests import TextsRequest
from shared.errors import ClientError
from shared.events import Inputs, Media, Params
from tests.models.reranker.harness import QUERY, TEXTS, predicted, reranker
from tests.tiny import tiny_checkpoint
from tests.tiny.encoders import tiny_encoder
from tests.tiny.rerankers import tiny_cross_encoder, tiny_judge


def test_rerankers_are_claimed_and_others_are_not() -> None:
    assert registry.family_of(tiny_cross_encoder("bert")) == "reranker"
    assert registry.family_of(tiny_cross_encoder("qwen3")) == "reranker"
    assert registry.family_of(tiny_judge()) == "reranker"
    assert registry.family_of(tiny_encoder("bert")) == "text_encoder"
    assert registry.family_of(tiny_checkpoint("qwen3")) == "decoder_lm"


def test_a_folder_is_served_without_a_file() -> None:
    assert resolve(str(tiny_cross_encoder("bert"))).model == "reranker"
    assert resolve(str(tiny_judge())).model == "reranker"
    assert GRAPH.outputs == ("score",)


@pytest.fixture
def changed(tmp_path: Path) -> Any:
    """Makes a copy of a cross-encoder whose `config.json` has further keys."""

    def change(**config: Any) -> Path:
        copy = shutil.copytree(tiny_cross_encoder("bert"), tmp_path / "copy")
        found = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(found | config))
        return copy

    return change


@pytest.mark.parametrize(
    "config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
        {},
    ],
)
def test_the_activation_is_the_folders_own(changed: Any, config: dict[str, Any]) -> None:
    copy = changed(**config)

    found = reranker(copy).score(QUERY, TEXTS)

    assert found == pytest.approx(predicted(copy, QUERY, TEXTS, batch_size=1), abs=1e-4)


def test_what_sentence_transformers_saves_is_read(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - seconds
    from torch.nn import Identity  # noqa: PLC0415

    built = CrossEncoder(
        str(tiny_cross_encoder("bert")), activation_fn=Identity(), max_length=20, device="cpu"
    )
    built.save_pretrained(str(tmp_path))

    assert registry.family_of(tmp_path) == "reranker"
    settings = folder.read(tmp_path)
    assert (settings.activation, settings.max_tokens) == ("identity", 20)
    assert reranker(tmp_path).score(QUERY, TEXTS) == pytest.approx(
        predicted(tmp_path, QUERY, TEXTS), abs=1e-4
    )


TEMPLATE = """{%- set query = (messages | selectattr("role", "eq", "query") | first).content -%}
{%- set text = (messages | selectattr("role", "eq", "document") | first).content -%}
{%- for one in messages if one.role == "system" -%}<|im_start|>{{ one.content }}{%- endfor -%}
Query: {{ query }} Document: {{ text }}<|im_end|>{% if add_generation_prompt %}never{% endif %} relevant:"""


@pytest.fixture
def template_judge(tmp_path: Path) -> Path:
    """A judge as sentence-transformers saves it: the tokens of the answers, a template and a prompt."""
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - seconds
    from sentence_transformers.base.modules import Transformer  # noqa: PLC0415
    from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: PLC0415

    copy = shutil.copytree(tiny_judge(), tmp_path / "copy")
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    model = Transformer(str(copy), transformer_task="text-generation", max_seq_length=120)
    modules = [model, LogitScore(true_token_id=70, false_token_id=90)]
    built = CrossEncoder(modules=modules, prompts={"web": "Rank."}, default_prompt_name="web", device="cpu")
    built.save_pretrained(str(tmp_path / "judge"))
    return tmp_path / "judge"


def test_a_folder_with_a_template_is_a_judge(template_judge: Path) -> None:
    assert registry.family_of(template_judge) == "reranker"
    assert folder.read(template_judge).answers == (70, 90)
    found = reranker(template_judge).score(QUERY, TEXTS)

    assert found == pytest.approx(predicted(template_judge, QUERY, TEXTS, batch_size=1), abs=2e-5)
    asked = reranker(template_judge).score(QUERY, TEXTS, instruction="Find cats.")
    wanted = predicted(template_judge, QUERY, TEXTS, batch_size=1, prompt="Find cats.")
    assert asked == pytest.approx(wanted, abs=2e-5)
    assert asked != pytest.approx(found, abs=1e-3)


WORDS_TEMPLATE = """{% for one in messages %}{{ one.role }} : {{ TEXT }} {% endfor %}mat"""
SHORT = [text for text in TEXTS if len(text.split()) < 40]
"""Texts that are not cut: in a vocabulary of words, the oracle takes an unknown word for the template's."""


@pytest.mark.parametrize("text", ["one.content", "one.content[0].text"], ids=["plain", "parts"])
@pytest.mark.parametrize("is_saved", [True, False])
def test_a_cross_encoder_with_a_template_of_pairs_is_given_it(
    text: str, tmp_path: Path, *, is_saved: bool
) -> None:
    from sentence_transformers import CrossEncoder  # noqa: PLC0415 - seconds

    built = shutil.copytree(tiny_cross_encoder("qwen3"), tmp_path / "built")
    (built / "chat_template.jinja").write_text(WORDS_TEMPLATE.replace("TEXT", text))
    if is_saved:
        saved = CrossEncoder(str(built), device="cpu", prompts={"web": "dog"}, default_prompt_name="web")
        saved.save(str(built := tmp_path / "saved"))

    found = reranker(built).score(QUERY, SHORT)

    assert found == pytest.approx(predicted(built, QUERY, SHORT, batch_size=1), abs=2e-5)
    plain = reranker(tiny_cross_encoder("qwen3")).score(QUERY, SHORT)
    assert abs(found - plain).max() > 0.05, "the control: without the template"
    asked = reranker(built).score(QUERY, SHORT, instruction="red")
    assert asked == pytest.approx(predicted(built, QUERY, SHORT, batch_size=1, prompt="red"), abs=2e-5)


def test_a_template_of_chats_alone_leaves_a_plain_cross_encoder_as_it_is(tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_cross_encoder("qwen3"), tmp_path / "copy")
    (copy / "chat_template.jinja").write_text("{% if messages[0].role == 'user' %}a{% endif %}")

    assert reranker(copy).score(QUERY, TEXTS) == pytest.approx(
        reranker(tiny_cross_encoder("qwen3")).score(QUERY, TEXTS), abs=2e-5
    )


def test_a_judge_without_a_template_or_of_another_kind_is_refused(
    template_judge: Path, tmp_path: Path
) -> None:
    (template_judge / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(CheckpointError, match="expected a chat template that renders the roles"):
        processing.load(template_judge, max_seq_len=64)

    other = shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama-reranker")
    assert registry.family_of(other) == "decoder_lm", "a Llama whose prompt nobody knows"
    with pytest.raises(
        CheckpointError, match="expected a Qwen3ForCausalLM, whose prompt for ranking is known"
    ):
        processing.load(other, max_seq_len=64)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]},
    ],
)
def test_the_tokenizer_decides_on_token_types(changed: Any, tokenizer: dict[str, Any]) -> None:
    copy = changed()
    found = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(found | tokenizer))

    assert reranker(copy).score(QUERY, TEXTS) == pytest.approx(
        predicted(copy, QUERY, TEXTS, batch_size=1), abs=1e-4
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "one label, found 2: a classifier is not served"),
        ({"sbert_ce_default_activation_function": "mine.Odd"}, r"torch\.nn: Sigmoid.*found 'mine\.Odd'"),
    ],
)
def test_other_models_are_refused(changed: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        nodes.load(changed(**config))


@pytest.mark.parametrize(
    ("inputs", "params", "message"),
    [
        (Inputs(messages=[{"role": "user", "content": "hi"}]), Params(), "expected texts and queries"),
        (Inputs(texts=["a"]), Params(), "expected texts and queries"),
        (Inputs(texts=["a", [4]], queries=["b"]), Params(), r"texts\[1\]: expected a text, found token ids"),
        (
            Inputs(texts=["a"], queries=["b"], files=[Media(modality="image", digest="0" * 64)]),
            Params(),
            "reads text only",
        ),
        (Inputs(texts=["a"], queries=["b"], output_modalities=["audio"]), Params(), "makes scores"),
        (Inputs(texts=["a", "\ud800"], queries=["b"]), Params(), "lone surrogate"),
        (Inputs(texts=["a"], queries=["b"]), Params(options={"instruction": "x"}), "is a cross-encoder"),
        (Inputs(texts=["a"], queries=["b"]), Params(dimensions=3), "a score has one"),
    ],
)
def test_what_is_no_pair_to_score_is_refused(inputs: Inputs, params: Params, message: str) -> None:
    args = {
        "inputs": to_builtins(inputs),
        "params": to_builtins(TextsRequest(inputs=inputs, params=params).params),
    }

    with pytest.raises(ClientError, match=message):
        reranker(tiny_cross_encoder("bert")).processing.run("prepare", "key", {}, args)
