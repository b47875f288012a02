"""From a decoded body to the samples to generate: model look-up, tokens, sampling, limits.

Decides and checks; does no I/O of its own. Long prompts are tokenized on threads that it owns.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from core.errors import BadRequest, NeverFits, NoCapacity, NoWorker, UnknownModel
from core.ids import RequestId, fresh_request_id
from core.request import SamplingParams, StopRules
from gateway.generation import Prompt, ServedModel
from gateway.http.ask import Ask, ChatAsk
from gateway.http.config import ApiConfig
from gateway.http.conversation import chat_characters
from gateway.http.headers import RequestHints
from gateway.http.samples import Sample
from gateway.http.schema import Body, CompletionBody
from gateway.http.structured import read_shape
from gateway.text.chat import AnswerText, Chat, ChatFormat, RenderedChat, TextRules
from gateway.text.grammar import AnswerGrammar, Shape, content_grammar
from gateway.text.grammar_check import GrammarChecker
from gateway.text.sample import SampleText
from gateway.text.tokenizer import Tokenizer
from gateway.text.verdict import WatchedAnswer
from gateway.timeline import Timeline

T = TypeVar("T")
_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
_SEED_MASK = 2**64 - 1


class Accepted(msgspec.Struct, frozen=True):
    """A request that may be sent to the cluster."""

    request_id: RequestId
    model: str
    samples: tuple[Sample, ...]
    echoes: tuple[str, ...]
    """Per choice, the prompt's text to repeat (empty unless asked for)."""
    num_prompt_tokens: int
    """Summed over prompts, each once."""
    with_logprobs: bool
    stream: bool
    reasons: bool = False
    """Answers have reasoning beside the text."""
    ignored: tuple[str, ...] = ()
    """Known fields that mean nothing to this model."""


class _PromptText(msgspec.Struct, frozen=True):
    ids: tuple[int, ...]
    text: str = ""
    """What `echo` repeats."""
    chat: RenderedChat | None = None
    grammar: AnswerGrammar | None = None
    shape: Shape | None = None


class Intake:
    """Turns bodies into samples. Used by one event loop; `close` ends its threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        config: ApiConfig,
        *,
        models: Callable[[], tuple[ServedModel, ...]],
        only: str,
        mint_seed: Callable[[], int],
        tell_verdict: Callable[[str], None],
    ) -> None:
        """`models` lists what is served now; `only` names the one model that ever will be, if that is set; `mint_seed`
        returns 64 random bits; `tell_verdict` hears of each finished answer with a form (`gateway.text.verdict`).
        """
        self._tokenizer = tokenizer
        self._format = chat_format
        self._config = config
        self._models = models
        self._only = only
        self._mint_seed = mint_seed
        self._tell_verdict = tell_verdict
        self._threads = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
        self._waiting = 0
        self._grammars = GrammarChecker()

    def close(self) -> None:
        """End the threads; prompts that wait for one are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def accept_chat(self, ask: ChatAsk, hints: RequestHints) -> Accepted:
        """Check a chat and tokenize it. Raises what `core.errors` lists for a request."""
        model = self.find(ask.body.model)
        shape = read_shape(ask.body, self._tokenizer.added_tokens, ask.format_field)
        rendered = await self.render(ask.chat if shape is None else replace(ask.chat, shape=shape))
        if rendered.grammar is not None:
            await self._grammars.check(rendered.grammar)
        prompt = _PromptText(rendered.token_ids, chat=rendered, grammar=rendered.grammar, shape=shape)
        given = {"thinking": ask.chat.thinking, "reasoning_effort": ask.chat.effort}
        ignored = sorted(name for name in self._format.ignored_fields if given[name] is not None)
        return self._accept(ask, model, hints, (prompt,), reasons=rendered.reasons, ignored=(*ask.ignored, *ignored))

    async def render(self, chat: Chat) -> RenderedChat:
        """Write a chat as a prompt, on a thread if it is long."""
        return await self.off_loop(chat_characters(chat), lambda: self._format.render(chat))

    async def accept_completion(self, body: CompletionBody, hints: RequestHints) -> Accepted:
        """Check a completion and tokenize its prompts. Raises what `core.errors` lists for a request."""
        model = self.find(body.model)
        if body.suffix:
            raise BadRequest("`suffix` (insertion) is not supported; leave it out", param="suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise BadRequest("`best_of` must equal `n` here; leave it out", param="best_of")
        if body.echo and body.logprobs is not None:
            raise BadRequest("`echo` with `logprobs` is not supported yet; use one of them", param="logprobs")
        shape = read_shape(body, self._tokenizer.added_tokens)
        grammar = content_grammar(shape) if shape is not None else None
        await self._grammars.check(grammar)
        prompts = [
            replace(await self._prompt_text(prompt, body, model), grammar=grammar, shape=shape)
            for prompt in _split_prompts(body.prompt)
        ]
        ask = Ask(
            prefix="cmpl",
            body=body,
            max_tokens=body.max_tokens,
            default_tokens=_COMPLETION_TOKENS,
            num_logprobs=body.logprobs if body.logprobs is not None else -1,
            prompt_field="prompt",
        )
        return self._accept(ask, model, hints, prompts)

    def default_model(self) -> str:
        """Return the name that a body without one means."""
        served = self._models()
        return served[0].name if served else self._only

    def find(self, name: str) -> ServedModel:
        """Return the model of that name; raises `UnknownModel` or, with nobody there, `NoWorker`."""
        models = self._models()
        if not models and (not self._only or name == self._only):
            raise NoWorker("no worker is registered yet; try again soon", retry_after_s=1.0)
        for model in models:
            if model.name == name:
                return model
        served = ", ".join(model.name for model in models) or self._only
        raise UnknownModel(f"the model `{name[:100]}` is not served here; served: {served}", param="model")

    async def _prompt_text(self, prompt: str | list[int], body: CompletionBody, model: ServedModel) -> _PromptText:
        tokenizer = self._tokenizer
        if isinstance(prompt, str):
            add = body.add_special_tokens is not False
            ids = await self.off_loop(len(prompt), lambda: tokenizer.encode_prompt(prompt, add_special_tokens=add))
            if not ids:
                raise BadRequest("the prompt is empty; send at least one token", param="prompt")
            return _PromptText(ids, prompt if body.echo else "")
        if not prompt:
            raise BadRequest("the prompt is empty; send at least one token", param="prompt")
        check_ids(prompt, model.vocab_size, "prompt")
        return _PromptText(tuple(prompt), tokenizer.decode(prompt) if body.echo else "")

    async def off_loop(self, num_chars: int, encode: Callable[[], T]) -> T:
        """Run `encode` here if the text is short, else on a thread."""
        if num_chars <= self._config.inline_chars:
            return encode()
        if self._waiting >= self._config.max_waiting_prompts:
            raise NoCapacity("too many long prompts wait to be tokenized; try again soon", retry_after_s=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        finally:
            self._waiting -= 1

    def _accept(
        self,
        ask: Ask,
        model: ServedModel,
        hints: RequestHints,
        prompts: Sequence[_PromptText],
        *,
        reasons: bool = False,
        ignored: tuple[str, ...] = (),
    ) -> Accepted:
        body = ask.body
        num_choices = self._num_choices(body, len(prompts))
        text = self._text_rules(body, model)
        check_ids(body.logit_bias or (), model.vocab_size, "logit_bias")
        sampling = _sampling(
            body, body.seed & _SEED_MASK if body.seed is not None else self._mint_seed(), ask.num_logprobs
        )
        request_id = fresh_request_id(ask.prefix)
        samples: list[Sample] = []
        for number, prompt in enumerate(prompts):
            rules = _stop_rules(ask, len(prompt.ids), model)
            for sample_index in range(num_choices):
                samples.append(
                    Sample(
                        index=len(samples),
                        prompt_index=number,
                        prompt=Prompt(
                            request_id=RequestId(f"{request_id}.{number}") if number else request_id,
                            model=model.name,
                            token_ids=prompt.ids,
                            sampling=sampling(sample_index),
                            stop=rules,
                            timeout_s=hints.timeout_s,
                            first_token_s=hints.first_token_s,
                            priority=body.priority if body.priority is not None else hints.priority or 0,
                            tenant=hints.tenant,
                            cache_salt=body.cache_salt or "",
                            session=hints.session,
                            images=prompt.chat.images if prompt.chat is not None else (),
                            grammar=prompt.grammar.text if prompt.grammar is not None else "",
                            timeline=Timeline() if body.timing else None,
                        ),
                        text=self._open_answer(
                            prompt, replace(text, call_prefix=f"call_{request_id[-24:]}_{sample_index}_")
                        ),
                    )
                )
        return Accepted(
            request_id=request_id,
            model=model.name,
            samples=tuple(samples),
            echoes=tuple(prompt.text for prompt in prompts for _ in range(num_choices)),
            num_prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            with_logprobs=ask.num_logprobs >= 0,
            stream=bool(body.stream),
            reasons=reasons,
            ignored=ignored,
        )

    def _num_choices(self, body: Body, num_prompts: int) -> int:
        """Return the answers to each prompt."""
        num_choices = body.n or 1
        if num_choices * num_prompts > self._config.max_choices:
            raise BadRequest(f"prompts x `n` may be at most {self._config.max_choices}", param="n")
        if body.stream_options is not None and not body.stream:
            raise BadRequest("`stream_options` needs `stream: true`", param="stream_options")
        return num_choices

    def _text_rules(self, body: Body, model: ServedModel) -> TextRules:
        check_ids(body.stop_token_ids or (), model.vocab_size, "stop_token_ids")
        silent = frozenset(body.stop_token_ids or ()) | frozenset(() if body.ignore_eos else model.eos_token_ids)
        return TextRules(
            stops=self._stops(body.stop),
            silent=silent,
            min_tokens=body.min_tokens or 0,
            skip_special=body.skip_special_tokens is not False,
        )

    def _open_answer(self, prompt: _PromptText, rules: TextRules) -> AnswerText:
        if prompt.chat is not None:
            text = prompt.chat.open_answer(rules)
        else:
            text = SampleText(
                self._tokenizer.vocabulary,
                stops=rules.stops,
                silent=rules.silent,
                min_tokens=rules.min_tokens,
                skip_special=rules.skip_special,
                continues=True,
            )
        return text if prompt.shape is None else WatchedAnswer(text, prompt.shape, self._judge)

    def _judge(self, shape: Shape, text: str) -> None:
        self._grammars.judge(shape, text, self._tell_verdict)

    def _stops(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if len(stops) > self._config.max_stops:
            raise BadRequest(f"at most {self._config.max_stops} stop strings are allowed", param="stop")
        if any(not text or len(text) > self._config.max_stop_chars for text in stops):
            raise BadRequest(f"a stop string has 1 to {self._config.max_stop_chars} characters", param="stop")
        return stops


def _split_prompts(prompt: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """Return the prompts one by one; raises `BadRequest` if kinds are mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("the prompt is empty; send at least one token", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    if ids or len({type(item) for item in prompt}) > 1:
        raise BadRequest("`prompt` mixes texts, ids and lists; send one kind", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


def check_ids(ids: Sequence[int] | dict[int, float], vocab_size: int, param: str) -> None:
    """Raise `BadRequest` for an id that the model does not have."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise BadRequest(f"token id {bad} is outside the vocabulary 0..{vocab_size - 1}", param=param)


def _sampling(body: Body, seed: int, num_logprobs: int) -> Callable[[int], SamplingParams]:
    """Return the sampling parameters as a function of the sample's index."""

    def build(sample_index: int) -> SamplingParams:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=body.logit_bias or {},
            seed=seed,
            sample_index=sample_index,
            num_logprobs=num_logprobs,
        )

    return build


def _stop_rules(ask: Ask, num_prompt_tokens: int, model: ServedModel) -> StopRules:
    """Fit the output bound into the deployment."""
    body, asked = ask.body, ask.max_tokens
    room = model.max_tokens_total - num_prompt_tokens
    if room < 1:
        raise NeverFits(
            f"the prompt has {num_prompt_tokens} tokens; this deployment holds at most {model.max_tokens_total} "
            "tokens of prompt and output together",
            param=ask.prompt_field,
        )
    if asked is not None and asked > room:
        raise NeverFits(
            f"the prompt has {num_prompt_tokens} tokens and {asked} more are asked for; this deployment holds at "
            f"most {model.max_tokens_total} tokens of prompt and output together",
            param=ask.max_tokens_field,
        )
    max_tokens = asked if asked is not None else min(room, ask.default_tokens or room)
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"`min_tokens` is {min_tokens}, more than the {max_tokens} allowed", param="min_tokens")
    return StopRules(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
    )
