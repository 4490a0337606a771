"""Templates that would never end, and those whose loops are as Jinja's own."""

import jinja2
import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.text.bounded_jinja import BoundedEnvironment, TemplateLimitError
from models.text.chat_template import ChatTemplate, ChatTemplateError

LOOPS = "{%% for i in range(99999) %%}{%% for j in range(99999)%s %%}%s{%% endfor %%}{%% endfor %%}"
ENDLESS = {
    "nested loops": LOOPS % ("", ""),
    "filtered loops": LOOPS % (" if j < 0", ""),
    "loops with their length": LOOPS % ("", "{{ loop.length }}"),
    "a macro that calls itself twice": """
        {% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}
    """,
    "a recursive loop": """
        {% for x in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}
    """,
    "a power": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "a product": "{{ ('x' * 99999) * 99999 }}",
    "a product of a list": "{{ 99999 * ([1] * 99999) }}",
}
ALIKE = (
    """{% for a in x %}{{ loop.index }}{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{{ loop.nextitem }}
    {{ loop.revindex }}{{ loop.cycle('a', 'b') }}{{ a }}{% else %}none{% endfor %}""",
    "{% for a in x if a > 1 %}{{ loop.length }}{{ a }}{% else %}none{% endfor %}",
    "{% for k, v in y.items() %}{{ k }}={{ v }};{% endfor %}",
    """{% for a in x %}{% if a == 2 %}{% continue %}{% endif %}{% if a == 3 %}{% break %}{% endif %}
    {{ a }}{% endfor %}""",
    "{% for a in missing %}{{ a }}{% else %}none{% endfor %}",
    """{% for a in z recursive %}<{{ loop.depth }}{% if a is iterable %}{{ loop(a) }}{% else %}{{ a }}
    {% endif %}>{% endfor %}""",
    """{% macro m(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(1) }}
    {% call m(3) %}in{% endcall %}""",
    "{% set ns = namespace(n=0) %}{% for a in x %}{% set ns.n = ns.n + a %}{% endfor %}{{ ns.n }}",
    """{% for a in x[::-1] %}{% set outer = loop %}{% for b in x %}{{ outer.index * loop.index }},{% endfor %}
    {% endfor %}""",
    "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 2 * 3.5 }}{{ -2 ** 2 }}",
)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_ended(name: str) -> None:
    environment = BoundedEnvironment()
    template = environment.from_string(ENDLESS[name])

    with pytest.raises(TemplateLimitError), environment.bounded(0.05):
        template.render()


@pytest.mark.parametrize("source", ALIKE)
def test_other_templates_are_rendered_as_by_jinja(source: str) -> None:
    data = {"x": [1, 2, 3], "y": {"a": 1}, "z": [[1, [2]], 3]}
    options = {"extensions": [loopcontrols], "trim_blocks": True, "lstrip_blocks": True}
    environment = BoundedEnvironment(**options)
    with environment.bounded():
        found = environment.from_string(source).render(data)

    assert found == ImmutableSandboxedEnvironment(**options).from_string(source).render(data)


def test_lines_of_errors_are_the_templates() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError) as caught:
        BoundedEnvironment().from_string("a\n{% for x in y %}\n{% endif %}")
    assert caught.value.lineno == 3


def test_a_chat_template_that_does_not_end_refuses_the_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedEnvironment.bounded.__wrapped__, "__defaults__", (0.05,))  # type: ignore[attr-defined]
    template = ChatTemplate(ENDLESS["nested loops"], {}, origin="x")

    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=r"did not end within 0\.05 s") as caught:
            template.render([{"role": "user", "content": "a"}])
        assert (caught.value.failure_code, caught.value.failure_status) == ("chat_template_error", 422)
