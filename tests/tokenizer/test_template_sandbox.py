"""A hostile template cannot reach out of its sandbox, run on, or fill the memory; an honest one finds what it needs."""

import gc
import os
import signal
import threading

import pytest

from modicum.store import UserError
from modicum.tokenizer.template import CHATML, Template

CONTEXT = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}


def render(source, context=CONTEXT, **limits):
    return Template(source, **limits).render(context, now=0.0)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['sys'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ (messages | attr('__class__')) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ['{0.__class__}'.format] | map('call', messages) | list }}",
        "{{ namespace.__init__ }}",
        "{% set n = namespace(a=1) %}{% set n.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{% extends 'x' %}",
    ],
)
def test_a_template_reaches_nothing_outside_its_data(escape):
    """Jinja refuses, or answers with an undefined value, which prints as nothing."""
    with pytest.raises(UserError, match=r"chat\.template: |^nothing$"):
        raise UserError(render(escape).text or "nothing")


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", id="no output"),
        pytest.param("{{ (messages | length * 10) ** (10 ** 9) }}", id="one instruction"),
        pytest.param("{{ 10 ** (10 ** 9) }}", id="while it is compiled"),
        pytest.param("{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}", id="little output"),
        pytest.param(
            "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}", id="recursion"
        ),
    ],
)
def test_a_template_that_runs_on_is_ended_by_the_clock(endless):
    with pytest.raises(UserError, match=r"chat.template: still running after 0.2 seconds; does it loop\?"):
        render(endless, seconds=0.2)


def test_a_template_that_calls_itself_without_end_is_refused():
    with pytest.raises(UserError, match="nested too deeply"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@pytest.mark.parametrize(
    "greedy",
    [
        "{{ 'a' * 10 ** 11 }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_a_template_that_fills_the_memory_is_refused(greedy):
    with pytest.raises(UserError, match="memory"):
        render(greedy)


def test_output_is_capped():
    with pytest.raises(UserError, match="writes more than 1,000 characters"):
        render("{% for i in range(999) %}xx{% endfor %}", max_characters=1000)
    assert render("{% for i in range(500) %}xx{% endfor %}", max_characters=1000).text == "x" * 1000


def test_a_template_of_absurd_size_is_refused():
    with pytest.raises(UserError, match="longer than 1,048,576 characters"):
        Template("x" * (2**20 + 1))


def test_a_syntax_error_names_its_line_when_the_template_is_loaded():
    with pytest.raises(UserError, match=r"chat\.template: line 2: "):
        Template("{{ messages }}\n{% if %}")


def test_a_template_can_refuse_a_conversation_in_its_own_words():
    with pytest.raises(UserError, match=r"chat\.template: only one message, please"):
        render("{{ raise_exception('only one message, please') }}")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'a': '<é>'} | tojson(ensure_ascii=True) }}", '{"a": "<\\u00e9>"}'),
        ("{{ {'b': [1], 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":2,"b":[1]}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y')[:2] }}", "19"),
        ("{% set n = namespace(a=1) %}{% for i in [1, 2] %}{% set n.a = n.a + i %}{% endfor %}{{ n.a }}", "4"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ dict(a=1) | tojson }}", '{"a": 1}'),
        ("a\n    {% if true %}\n  b\n{% endif %}\nc\n", "a\n  b\nc"),
        ("{{ bos_token }}{{ nothing }}", ""),
    ],
)
def test_a_template_finds_the_functions_and_rules_that_transformers_gives_it(source, text):
    assert render(source).text == text


def test_nothing_random_is_at_hand():
    for source in ("{{ lipsum() }}", "{{ [1, 2] | random }}"):
        with pytest.raises(UserError, match=r"chat.template: "):
            render(source)


def test_generation_blocks_are_reported_where_they_stand():
    rendered = render("ab{% generation %}cd{{ 'é' }}{% endgeneration %}f{% generation %}{% endgeneration %}")
    assert rendered.text == "abcdéf"
    assert rendered.blocks == [(2, 5), (6, 6)]


def test_the_shipped_template_renders_here_and_others_in_a_process_of_their_own():
    assert Template(CHATML)._child is None
    assert Template(CHATML + " ")._child is not None


def test_after_an_end_by_the_clock_the_next_conversation_renders():
    template = Template("{% for b in range(n) %}{% for c in range(n) %}{% endfor %}{% endfor %}x", seconds=0.3)
    with pytest.raises(UserError, match="still running"):
        template.render({"n": 99999}, now=0.0)
    assert template.render({"n": 1}, now=0.0).text == "x"


def test_a_killed_process_is_one_clear_error_and_the_next_conversation_renders():
    template = Template("{{ messages[0].content }}")
    template._child._process.kill()
    template._child._process.wait()
    with pytest.raises(UserError, match="its process ended with status -9"):
        template.render(CONTEXT, now=0.0)
    assert template.render(CONTEXT, now=0.0).text == "hi"


def test_an_interrupted_request_leaves_no_answer_for_the_next_one():
    template = Template("{% for i in range(m) %}{% for j in range(9999) %}{% endfor %}{% endfor %}{{ m }}")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            template.render({"m": 9999}, now=0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert template.render({"m": 1}, now=0.0).text == "1"


def test_threads_share_a_template_without_mixing_their_texts():
    for source in ("{{ messages[0].content }}", CHATML):
        template = Template(source)
        wrong = []

        def ask(name, template=template, wrong=wrong):
            for _ in range(50):
                context = {"messages": [{"role": "user", "content": name}], "add_generation_prompt": False}
                if name not in template.render(context, now=0.0).text:
                    wrong.append(name)

        threads = [threading.Thread(target=ask, args=(f"text {n}",)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_the_process_ends_with_its_template():
    template = Template("x")
    number = template._child._process.pid
    os.kill(number, 0)
    del template
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_forked_copy_starts_a_process_of_its_own():
    template = Template("{{ n }}")
    child = os.fork()
    if child == 0:
        right = template.render({"n": 1}, now=0.0).text == "1"
        os._exit(0 if right else 1)
    texts = [template.render({"n": n}, now=0.0).text for n in range(50)]
    assert os.waitpid(child, 0)[1] == 0
    assert texts == [str(n) for n in range(50)]
