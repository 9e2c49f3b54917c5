"""`jaxformer serve MODEL`: a decoder behind the API of OpenAI, and a page to chat with it.

One thread writes the texts of all requests in the rows of `jaxformer.generation.refill`, and the
event loop of the server reads requests and sends what is written, so that a slow reader holds up
nobody.
"""

import asyncio
import contextlib
import hmac
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxformer.cli.arguments import ServeArguments
from jaxformer.cluster.signals import StopRequest, current
from jaxformer.data.records import CHAT_ROLES
from jaxformer.files import ConfigError, parse_object
from jaxformer.generation.refill import CHUNK, TOP, Made, RowWriter
from jaxformer.generation.sampling import FILTERS, NUMBERS, Sampling, Values, whole_from
from jaxformer.generation.stop_strings import StopStrings, before_stop
from jaxformer.runs.prompting import Model, drawing_rules, open_model, start_of, turn_of
from jaxformer.tokenizer.chat import BESIDE, checked_messages, with_beside

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError:
    raise ConfigError(
        "jaxformer serve needs starlette and uvicorn: pip install 'jaxformer[serve]'."
    ) from None

MOST_TEXTS = 128  # of a request
MOST_STOPS = 16  # strings of a request
TAIL = 8  # tokens of a prompt by which the text of the tokens after it is decoded
# The kinds of OpenAI's errors by status; "server_error" for others.
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
)


class Refused(Exception):
    """A request that is answered by an error of OpenAI's form: the HTTP status, what is wrong, and
    the field of the request, if it is one."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field

    def body(self) -> dict[str, Any]:
        kind = "server_error"
        if self.status < 500:
            kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.field, "code": self.status}
        return {"error": error}


def _are_stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    is_list = isinstance(texts, list) and len(texts) <= MOST_STOPS
    return is_list and all(isinstance(text, str) and text for text in texts)


BOOLEAN = Values(lambda value: isinstance(value, bool), "true or false")
LIST = Values(lambda value: isinstance(value, list), "a list")
COUNTED = Values(whole_from(1), "a whole number, at least 1")
TOPS = Values(whole_from(0, TOP), f"a whole number from 0 to {TOP}")
# What the fields of a request may be. The numbers are those of `Sampling`.
FIELDS: dict[str, Values] = {
    "model": Values(lambda value: isinstance(value, str), "the name of the model"),
    "n": Values(whole_from(1, MOST_TEXTS), f"a whole number from 1 to {MOST_TEXTS}"),
    "seed": Values(whole_from(-(2**63), 2**63 - 1), "a whole number of 64 bits"),
    "stop": Values(_are_stops, f"a text or a list of at most {MOST_STOPS} texts, none empty"),
    "stream": BOOLEAN,
    "stream_options": Values(lambda value: isinstance(value, dict), "an object"),
    "max_tokens": COUNTED,
    **{name: Sampling.values[name] for name in NUMBERS},
}
OF_CHAT: dict[str, Values] = {
    "messages": LIST,
    "max_completion_tokens": COUNTED,
    "logprobs": BOOLEAN,
    "top_logprobs": TOPS,
    "tool_choice": Values(lambda value: value in ("auto", "none"), "auto or none"),
    **dict.fromkeys(BESIDE, LIST),
}
OF_TEXT = {"prompt": Values(lambda value: True, ""), "logprobs": TOPS}
# They change no text: about accounts, or (the last one) leave to do what the model may do anyway.
WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    "parallel_tool_calls",
)


@dataclass(eq=False)
class Text:
    """A text to be written: what a row takes of it, and where its tokens go.

    `give` takes the new tokens and the reason why the text has ended, "" before; or an error.
    """

    prompt: list[int]
    count: int
    key: jax.Array
    numbers: dict[str, Any]
    end_tokens: tuple[int, ...]
    stops: StopStrings
    deadline: float
    give: Callable[[Any], None]
    is_wanted: bool = True


class Writer:
    """The thread that writes texts, in the order in which they come."""

    def __init__(self, model: Model, args: ServeArguments, context: int) -> None:
        rules = Sampling(**model.writing_rules() | {"temperature": 0.0})
        self.rows = RowWriter(
            model.params, model.config, rules, args.rows, (context, 0), own_numbers=True
        )
        self._limit = args.rows + args.queue  # texts that run or wait
        self._timeout = args.timeout
        self.running: dict[int, tuple[Text, list[int]]] = {}  # by row, with the tokens so far
        self._waiting: deque[Text] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.has_failed = False
        self.failed: Callable[[], None] = lambda: None  # is called then
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[Text]) -> None:
        """Takes the texts of a request, or refuses it."""
        with self._changed:
            if len(texts) > self._limit:
                raise Refused(400, f"{len(texts)} texts are more than rows and queue hold.", "n")
            if len(texts) + len(self._waiting) + len(self.running) > self._limit:
                raise Refused(429, "too many texts wait for a row: try again later.")
            if self._is_closed:
                raise Refused(503, "the server ends.")
            self._waiting += texts
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._next():
                pass
        except BaseException:
            traceback.print_exc()
            with self._changed:
                self._is_closed = True
                self.has_failed = True
                texts = [*self._waiting, *(text for text, _ in self.running.values())]
            for text in texts:
                text.give(Refused(500, "the model failed; the server's output says why."))
            self.failed()

    def _next(self) -> bool:
        """Wait for texts, and write a few tokens of each; False once the thread has to end."""
        with self._changed:
            while not (self._waiting or self.running or self._is_closed):
                self._changed.wait()
            if not (self._waiting or self.running):
                return False
            # Unwanted texts free their rows, and their places in the queue.
            for row, (text, _) in [*self.running.items()]:
                if not self._is_current(text):
                    self.rows.end(row)
                    del self.running[row]
            self._waiting = deque(filter(self._is_current, self._waiting))
            free = self.rows.free()
            new = [self._waiting.popleft() for _ in free[: len(self._waiting)]]
        for text in new:
            try:
                row = self.rows.read(text.prompt, text.key, text.count, **text.numbers)
                self.running[row] = (text, [])
            except ConfigError as error:
                text.give(Refused(400, str(error)))
        if not self.running:
            return True
        # A new text shows its first token at once.
        for row, made in self.rows.advance(1 if new else CHUNK // 4).items():
            text, tokens = self.running[row]
            before = len(tokens)
            tokens += made.tokens.tolist()
            reason = ""
            if row in self.rows.free():
                reason = "length"
            ends = [i + 1 for i, token in enumerate(tokens) if token in text.end_tokens]
            stop = text.stops.length(tokens)
            if ends or stop:
                reason = "stop"
                del tokens[min(filter(None, [*ends, stop])) :]
            if reason:
                self.rows.end(row)
                del self.running[row]
            count = len(tokens) - before
            text.give((jax.tree.map(lambda array: array[:count], made), reason))  # noqa: B023
        return True

    def _is_current(self, text: Text) -> bool:
        if text.is_wanted and time.monotonic() > text.deadline:
            text.is_wanted = False
            text.give(Refused(504, f"the request took more than {self._timeout:g} seconds."))
        return text.is_wanted


# How Qwen, Hermes and SmolLM3 write that they call a tool.
CALL_BEGINS = "<tool_call>"
CALL = re.compile(rf"{CALL_BEGINS}\s*(.*?)\s*</tool_call>", re.DOTALL)


class Addition(NamedTuple):
    """What is added to a text: its number, the characters, their tokens, why it ends ("" before),
    and where it ends the calls of tools that are not among the characters."""

    number: int
    text: str
    made: Made
    reason: str
    calls: list[dict[str, Any]]


def calls_of(text: str) -> list[dict[str, Any]]:
    """Return the calls of tools in a text as the API has them; none if one is malformed."""
    calls = []
    for index, content in enumerate(CALL.findall(text)):
        try:
            call = parse_object(content, "a call", "write an object")
        except ConfigError:
            return []
        name = call.get("name")
        arguments = call.get("arguments")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        identity = f"call_{secrets.token_hex(12)}"
        calls.append({"index": index, "id": identity, "type": "function", "function": function})
    return calls


class Server:
    """The answers to requests."""

    def __init__(self, model: Model, args: ServeArguments) -> None:
        self.model = model
        self.args = args
        self.name = args.name or args.path.resolve().name
        self.context = min(args.max_length or model.context(), model.context())
        self.writer = Writer(model, args, self.context)

    def application(self) -> Starlette:
        page = files("jaxformer.cli").joinpath("chat.html").read_bytes()
        listed = {"id": self.name, "object": "model", "owned_by": "jaxformer"}
        models = {"object": "list", "data": [listed | {"created": int(time.time())}]}

        async def chat_page(request: Request) -> Response:
            return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

        async def list_models(request: Request) -> Response:
            self._check_key(request)
            return JSONResponse(models)

        async def refused(request: Request, error: Exception) -> Response:
            if not isinstance(error, Refused):
                status = getattr(error, "status_code", 400)
                error = Refused(status, str(error) or "the client left.")
            return JSONResponse(error.body(), error.status)

        return Starlette(
            routes=[
                Route("/", chat_page),
                Route("/v1/models", list_models),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            exception_handlers=dict.fromkeys(
                (Refused, ConfigError, HTTPException, ClientDisconnect), refused
            ),
        )

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request, FIELDS | OF_TEXT)
        prompts = body.get("prompt", "")
        if not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        is_token = whole_from(0, self.model.config.vocab_size - 1)
        starts = []
        for prompt in prompts:
            if isinstance(prompt, str):
                start, _ = start_of(self.model, prompt)
            elif isinstance(prompt, list) and all(map(is_token, prompt)):
                start = prompt
            else:
                raise Refused(400, "prompt must be a text, tokens, or a list of these.", "prompt")
            starts.append(start or [self.model.tokenizer.end_token])
        count = body.get("max_tokens", 16)  # as the API of OpenAI has it
        return await self._answer(request, body, self.model, starts, count, body.get("logprobs"))

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request, FIELDS | OF_CHAT)

        def turn() -> tuple[Model, list[int]]:
            messages = checked_messages(body.get("messages"))
            for message in messages:
                message["role"] = CHAT_ROLES.get(message["role"], message["role"])
            beside = {key: body.get(key) for key in BESIDE}
            if body.get("tool_choice") == "none":
                beside["tools"] = None
            messages[0] = with_beside(messages[0], beside)
            return turn_of(self.model, messages)

        # The template is rendered by a process, for which a thread waits.
        answering, start = await run_in_threadpool(turn)
        count = body.get("max_completion_tokens", body.get("max_tokens"))
        top = body.get("top_logprobs", 0)
        if not body.get("logprobs"):
            if top:
                raise Refused(400, "top_logprobs needs logprobs=true.", "top_logprobs")
            top = None
        return await self._answer(request, body, answering, [start], count, top, is_chat=True)

    async def _body(self, request: Request, fields: Mapping[str, Values]) -> dict[str, Any]:
        """Return the checked fields of a request that are not null."""
        self._check_key(request)
        # Pages of other sites can send any other type without asking.
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise Refused(415, "the body must be JSON, with Content-Type: application/json.")
        content = b""
        try:
            async with asyncio.timeout(self.args.timeout):
                async for part in request.stream():
                    content += part
                    if len(content) > self.args.max_bytes:
                        raise Refused(413, f"the body exceeds {self.args.max_bytes} bytes.")
        except TimeoutError:
            raise Refused(408, "the body did not come in time.") from None
        stated = parse_object(content, "the body", "send an object")
        body = {key: value for key, value in stated.items() if value is not None}
        for name, value in body.items():
            if name in fields:
                allowed, words = fields[name]
                if not allowed(value):
                    raise Refused(400, f"{name}={str(value)[:80]} must be {words}.", name)
            elif value and name not in WITHOUT_EFFECT:
                raise Refused(400, f"there is no field {name!r}, or it is not supported.", name)
        if body.get("model", self.name) != self.name:
            message = f"there is no model {body['model'][:80]!r}, but {self.name!r}."
            raise Refused(404, message, "model")
        return body

    def _check_key(self, request: Request) -> None:
        expected = self.args.api_key
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if expected and not hmac.compare_digest(given.encode(), expected.encode()):
            raise Refused(401, "the API key is missing or wrong: send Authorization: Bearer KEY.")

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        model: Model,
        starts: list[list[int]],
        count: int | None,
        top: int | None,
        is_chat: bool = False,
    ) -> Response:
        """Return the response with `n` texts after each start."""
        for start in starts:
            space = self.context - len(start)
            if space < (count or 1):
                raise Refused(
                    400,
                    f"a prompt of {len(start)} tokens and {count or 1} new ones exceed the"
                    f" {self.context} tokens of a text: shorten the prompt, or ask for less.",
                    "messages" if is_chat else "prompt",
                )
        stops = body.get("stop", [])
        if isinstance(stops, str):
            stops = [stops]
        numbers = _numbers(model, body, is_chat) | {"scored": top is not None}
        key = jax.random.key(body.get("seed", secrets.randbits(31)))
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Any] = asyncio.Queue()
        texts: list[Text] = []
        for start in starts:
            for _ in range(body.get("n", 1)):
                index = len(texts)

                def give(what: Any, index: int = index) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(news.put_nowait, (index, what))

                texts.append(
                    Text(
                        start,
                        count or self.context - len(start),
                        jax.random.fold_in(key, index),
                        numbers,
                        model.end_tokens,
                        StopStrings(stops, model.tokenizer),
                        time.monotonic() + self.args.timeout,
                        give,
                    )
                )
        self.writer.submit(texts)
        calls = is_chat and bool(body.get("tools")) and body.get("tool_choice") != "none"
        pieces = self._pieces(request, model, texts, news, stops, calls)
        form = Form(self, is_chat, top)
        prompt_tokens = sum(map(len, starts))
        if not body.get("stream"):
            return JSONResponse(await form.whole(pieces, len(texts), prompt_tokens))
        with_usage = bool(body.get("stream_options", {}).get("include_usage"))
        events = form.events(pieces, with_usage, prompt_tokens)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _pieces(
        self,
        request: Request,
        model: Model,
        texts: list[Text],
        news: asyncio.Queue[Any],
        stops: list[str],
        with_calls: bool,
    ) -> AsyncIterator[Addition]:
        """Yield what is added to the texts, as it is written, until all have ended. Nobody wants
        them any more where this ends before. `with_calls`: what calls tools is no text."""

        async def leaving() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        # The last characters, which may be the beginning of a stop string or of a call, wait for
        # the next piece.
        begins = [CALL_BEGINS] if with_calls else []
        waiting = max(map(len, [*stops, *begins]), default=1) - 1
        made: list[list[int]] = [[] for _ in texts]
        shown = [0] * len(texts)
        unfinished = len(texts)
        gone = asyncio.ensure_future(leaving())
        try:
            while unfinished:
                coming = asyncio.ensure_future(news.get())
                await asyncio.wait({coming, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():  # nobody reads what is answered
                    coming.cancel()
                    return
                index, what = coming.result()
                if isinstance(what, Refused):
                    raise what
                new, reason = what
                made[index] += new.tokens.tolist()
                text = model.text_after(texts[index].prompt[-TAIL:], made[index])
                before = before_stop(text, stops)
                end = len(before)
                if not reason:
                    end = min(end, len(text) - waiting)
                    # So does a character that still lacks bytes.
                    if text.endswith("\N{REPLACEMENT CHARACTER}"):
                        end = shown[index]
                calls = []
                if with_calls and CALL_BEGINS in before:
                    if reason:
                        calls = calls_of(before)
                    # What begins as a call and ends without one that can be read is text.
                    if calls or not reason:
                        end = min(end, before.index(CALL_BEGINS))
                end = max(end, shown[index])
                yield Addition(index, before[shown[index] : end], new, reason, calls)
                shown[index] = end
                unfinished -= bool(reason)
        finally:
            gone.cancel()
            for each in texts:
                each.is_wanted = False


class Form:
    """The JSON of OpenAI for the texts of a request, whole and in events. `top` is the number of
    likeliest tokens that are listed with each one, None without log-probabilities."""

    def __init__(self, server: Server, is_chat: bool, top: int | None) -> None:
        self._tokenizer = server.model.tokenizer
        self._is_chat = is_chat
        self._top = top
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": server.name,
        }

    async def whole(
        self, pieces: AsyncIterator[Addition], count: int, prompt_tokens: int
    ) -> dict[str, Any]:
        texts = [""] * count
        reasons = [""] * count
        scores: list[list[dict[str, Any]]] = [[] for _ in texts]
        calls: list[list[dict[str, Any]]] = [[] for _ in texts]
        made = 0
        async for index, added, new, reason, called in pieces:
            texts[index] += added
            reasons[index] += reason
            scores[index] += self._scores(new)
            calls[index] += called
            made += len(new.tokens)
        each = enumerate(zip(texts, scores, reasons, calls, strict=True))
        choices = [self._choice(index, "message", *parts) for index, parts in each]
        return self._head | {"choices": choices, "usage": _usage(prompt_tokens, made)}

    async def events(
        self, pieces: AsyncIterator[Addition], with_usage: bool, prompt_tokens: int
    ) -> AsyncIterator[str]:
        head = self._head
        if self._is_chat:
            head = head | {"object": "chat.completion.chunk"}
        made = 0
        try:
            async for index, added, new, reason, calls in pieces:
                made += len(new.tokens)
                scores = self._scores(new)
                if added or reason or scores:
                    choice = self._choice(index, "delta", added, scores, reason, calls)
                    yield _event(head | {"choices": [choice]})
        except Refused as error:
            yield _event(error.body())
            return
        if with_usage:
            yield _event(head | {"choices": [], "usage": _usage(prompt_tokens, made)})
        yield "data: [DONE]\n\n"

    def _choice(
        self,
        index: int,
        key: str,
        text: str,
        scores: list[dict[str, Any]],
        reason: str,
        calls: list[dict[str, Any]],
    ) -> dict[str, Any]:
        """Return one of the texts, or what is added to it; in chats it is the content of `key`."""
        logprobs: dict[str, Any] | None = None
        content: dict[str, Any] = {"text": text}
        if self._is_chat:
            content = {key: {"role": "assistant", "content": text}}
            if calls:
                content[key]["tool_calls"] = calls
                reason = "tool_calls"
        if self._top is not None and self._is_chat:
            logprobs = {"content": scores}
        elif self._top is not None:
            tops = [{top["token"]: top["logprob"] for top in s["top_logprobs"]} for s in scores]
            logprobs = {
                "tokens": [score["token"] for score in scores],
                "token_logprobs": [score["logprob"] for score in scores],
                "top_logprobs": tops,
            }
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason or None}

    def _scores(self, made: Made) -> list[dict[str, Any]]:
        """Return the log-probabilities of new tokens as chats have them; none if nobody asked."""
        if self._top is None:
            return []
        # [n, 1 + top]: each token, and the likeliest in its place
        tokens = np.column_stack([made.tokens, made.alternatives[:, : self._top]])
        logs = np.column_stack([made.log_probs, made.alternative_log_probs[:, : self._top]])
        scores = []
        for entries in zip(tokens.tolist(), logs.tolist(), strict=True):
            first, *others = [self._score(*entry) for entry in zip(*entries, strict=True)]
            scores.append(first | {"top_logprobs": others})
        return scores

    def _score(self, token: int, log: float) -> dict[str, Any]:
        raw = self._tokenizer.raw(token)
        shown = raw.decode(errors="replace") or self._tokenizer.shown(token)
        # JSON has no infinity; vLLM writes this number for it too.
        return {"token": shown, "logprob": max(log, -9999.0), "bytes": [*raw]}


def _usage(prompt_tokens: int, made: int) -> dict[str, int]:
    total = prompt_tokens + made
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": total}


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _numbers(model: Model, body: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """Return the numbers of the rules of a request: what it states, before what the model's
    generation_config.json states, before the defaults of `jaxformer sample`."""
    stated = {name: body[name] for name in NUMBERS if name in body}
    drawing, defaults = drawing_rules(model.tokenizer, stated, is_chat)
    neutral = Sampling()
    numbers = {name: getattr(neutral, name) for name in NUMBERS} | defaults
    numbers |= {key: value for key, value in model.writing_rules().items() if key in NUMBERS}
    numbers |= drawing | stated
    if numbers["temperature"] == 0:
        # Filters change nothing then, and take time.
        numbers |= {name: getattr(neutral, name) for name in FILTERS[1:]}
    numbers["top_k"] = min(numbers["top_k"], model.config.vocab_size)
    return numbers


def run(args: ServeArguments) -> int:
    args.check()
    model = open_model(**args.model)
    config = model.config
    if config.output != "language" or config.family != "decoder":
        raise ConfigError(
            f"{args.path} is a model with model.family={config.family!r} and the head"
            f" {config.output!r}: jaxformer serve takes decoders that write text."
        )
    args = replace(args, api_key=args.api_key or os.environ.get("JAXFORMER_API_KEY", ""))
    kind = socket.AF_INET
    if ":" in args.host:
        kind = socket.AF_INET6
    with socket.socket(kind) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((args.host, args.port))
        except OSError as error:
            raise ConfigError(
                f"{args.host}, port {args.port}, cannot be bound to ({error.strerror}): choose"
                " another --host or --port."
            ) from None
        server = Server(model, args)
        # Its own log is of errors alone.
        loop = uvicorn.Server(uvicorn.Config(server.application(), log_level="error"))

        def failed() -> None:
            loop.should_exit = True

        server.writer.failed = failed
        port = listening.getsockname()[1]
        print(f"{server.name} is served at http://{args.host}:{port}/ (Ctrl-C ends it)", flush=True)
        if not args.api_key and args.host not in ("127.0.0.1", "::1", "localhost"):
            print("note: any machine that reaches it may use it: set --api_key.", file=sys.stderr)
        # A signal ends the server once the requests that it has taken are answered.
        with (current() or StopRequest()).hold():
            loop.run(sockets=[listening])
            server.writer.close()
    return int(server.writer.has_failed)
