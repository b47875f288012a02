"""A model's chat template: messages in, one text out, in a sandbox with the names that published templates expect.

Knows no tokens and no injection rules; what it is given it renders.
"""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from core.errors import BadRequest, ConfigError

Now = Callable[[], dt.datetime]
"""Local wall-clock time: some templates write today's date into the system text."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that a request's own template arguments may not set."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; here it only passes its body on."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it this way)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _DateWriter:
    def __init__(self, now: Now) -> None:
        self._now = now

    def __call__(self, form: str) -> str:
        return self._now().strftime(form)


class ChatTemplate:
    """One compiled template with the model's special token names."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Now) -> None:
        """`special_tokens` maps names such as ``bos_token`` to their text. Raises `ConfigError` on a syntax error."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        names = cast("dict[str, Any]", environment.globals)  # the stub lists only Jinja's own globals
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _DateWriter(now)
        environment.filters["tojson"] = _tojson
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
        self.source = source
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        """Names that the template reads and does not set itself."""
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text; raises `BadRequest` if the template refuses the messages."""
        clash = RESERVED & variables.keys()
        if clash:
            raise BadRequest(f"`{min(clash)}` cannot be a template argument", param="chat_template_kwargs")
        values: dict[str, Any] = {"tools": list(tools) or None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(**values, messages=list(messages), add_generation_prompt=add_generation_prompt)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise BadRequest(f"the chat template does not accept these messages: {error}", param="messages") from error
