"""Templates of records: how each record becomes ids, and these the arrays of a row; and the rows of
whole examples, packed."""

import abc
import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxformer.data.documents import Record, RecordError, Value, fingerprint
from jaxformer.data.examples import ExampleStore, Labels, Parts
from jaxformer.data.rows import NumpyBatch, RowFormat, Rows, joined, joined_row, stacked
from jaxformer.files import ConfigError
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.chat import ChatTemplate, Marked, UnboundedTemplate, template_fingerprint
from jaxformer.tokenizer.tokenizer import Frame, closed

# Rows that an example may go to; when none has room, the fullest is closed for a new one.
OPEN_ROWS = 512


class Template(abc.ABC):
    """What the records of an objective become.

    `capacity` is how many tokens each stream of a row holds (a row has one, or a source and a
    target), `lengths` how long those arrays of a row are that have another length than its tokens.
    With `neighbors` a row is made of an example and of the next one, where rows are not packed.
    `recipe` is what its ids depend on beside the records and the tokenizer, and `cut_where` says
    where what does not fit is cut.
    """

    packs = True
    neighbors = False
    cut_where = "at the end"
    recipe: tuple[str, ...] = ()

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.end_token
        self.length = row_format.length
        self.cut = row_format.cut
        self.lengths = row_format.source_lengths
        self.format = row_format
        self.capacity: tuple[int, ...] = (self.length,)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """Return the ids of each record's parts, which here are texts; a new label gets the next
        number."""
        texts = [[*map(str, field)] for field in zip(*records, strict=True)]
        return zip(*map(self.tokenizer.encode_batch, texts), strict=True)

    @functools.cached_property
    def chat(self) -> ChatTemplate:
        return ChatTemplate.of(self.tokenizer)

    def warnings(self) -> list[str]:
        """Return what a user should know before training on these records."""
        return []

    @abc.abstractmethod
    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens that examples of parts of these `lengths` [N, parts] would take of each
        stream, uncut: [N, streams]."""

    @abc.abstractmethod
    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        """Return the arrays of one example, cut to what a row holds."""

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        """Return the arrays of a row: those of its examples one after the other, numbered from 1 as
        segments, and padding."""
        return joined_row(examples, self.length, self.lengths)


class SidesTemplate(Template):
    """Two texts of one example a row, each array [2, T], or more with negatives."""

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.length,) * (2 + row_format.negatives)
        if row_format.negatives:
            self.recipe += (str(row_format.negatives),)

    def pair(self, sides: list[NumpyBatch]) -> NumpyBatch:
        """Return the arrays [2, T] of two texts, or of more, each padded as a row of its own."""
        return stacked([Template.row(self, [side]) for side in sides])

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        (pair,) = examples
        return pair


class PairTemplate(Template):
    """Sequence to sequence: a source and a target with their special tokens; the decoder reads the
    target after its start token, and predicts it and the end token."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.capacity = (self.format.source_length, self.length)
        self.more = np.array([len(tokenizer.as_source([])), len(tokenizer.as_target([]))])

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths + self.more

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        # Room for the text beside the special tokens: [source, target].
        source_size, target_size = np.array(self.capacity) - self.more
        source, target = parts
        tokens = self.tokenizer.as_target(target[:target_size])
        return {
            "source": joined(self.tokenizer.as_source(source[:source_size])),
            "tokens": joined(tokens),
            "targets": joined(tokens[1:], [self.end]),
            "weights": np.ones(len(tokens), np.float32),
        }


class ExampleRows(Rows):
    """Rows of whole examples, packed in an order that the seed gives; one example a row where the
    template does not pack. Examples without a target are in no row.

    `left_out` counts these, and `cut` those of the others that are longer than a row, which the
    template cuts; `filled` is the fraction of the rows that holds tokens.
    """

    store: ExampleStore

    def __init__(self, store: ExampleStore, template: Template, seed: int) -> None:
        super().__init__(store)
        self.template = template
        # [examples, streams] and [streams]
        lengths = store.lengths()
        sizes = template.sizes(lengths)
        capacity = np.array(template.capacity)
        # An example that is whole and has something to learn, in its last part, has a target.
        doubtful = (sizes > capacity).any(1) | (sizes < 1).any(1) | (lengths[:, -1] == 0)
        learned = np.ones(len(store), bool)
        for index in np.flatnonzero(doubtful).tolist():
            weights = template.arrays(*store[index]).get("weights", np.ones(1))
            learned[index] = weights.any(-1).all()
        self.left_out = len(store) - int(learned.sum())
        if self.left_out:
            # A run that has them in its rows is another one.
            self.fingerprint = fingerprint(store.fingerprint, np.flatnonzero(~learned).tolist())
        self.cut = int((sizes > capacity)[learned].any(1).sum())
        fitted = np.minimum(sizes, capacity)
        # Without packing in the order of the data, which `Batches` shuffles.
        rows = [[index] for index in np.flatnonzero(learned).tolist()]
        if template.neighbors:
            rows = [[*row, *after] for row, after in zip(rows, rows[1:] + rows[:1], strict=True)]
        if template.packs:
            order = np.random.default_rng(seed).permutation(len(store))
            rows = first_fit(fitted, capacity, order[learned[order]])
        # The examples of row r are _members[_bounds[r] : _bounds[r + 1]].
        self._members = np.fromiter((index for row in rows for index in row), np.int64)
        self._bounds = np.cumsum([0, *map(len, rows)])
        self.filled = float(fitted[learned].sum() / max(1, len(rows) * capacity.sum()))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def most_segments(self) -> int | None:
        return int(np.diff(self._bounds).max(initial=1))

    def members(self, index: int) -> np.ndarray:
        """Return the numbers of the examples in a row, in order."""
        return self._members[self._bounds[index] : self._bounds[index + 1]]

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        members = self.members(index)
        return self.template.row([self.template.arrays(*self.store[member]) for member in members])


def first_fit(sizes: np.ndarray, capacity: np.ndarray, order: np.ndarray) -> list[list[int]]:
    """Return the numbers of the examples in each row: each goes to the first open row that has room
    in all streams.

    `sizes` [N, streams] are at most `capacity` [streams].
    """
    # The room in each open row, and its number; -1 has room for nothing, so no row is open yet.
    left = np.full((len(capacity), OPEN_ROWS), -1, np.int64)
    row_of_slot = np.zeros(OPEN_ROWS, np.int64)
    rows: list[list[int]] = []
    for index in order.tolist():
        size = sizes[index][:, None]
        fits = (left >= size).all(0)
        # The first that fits, or 0.
        slot = int(fits.argmax())
        if not fits[slot]:
            slot = int(left.min(0).argmin())
            left[:, slot] = capacity
            row_of_slot[slot] = len(rows)
            rows.append([])
        left[:, slot] -= size[:, 0]
        rows[row_of_slot[slot]].append(index)
    return rows


JOINT_IDS = "ids of joint texts"
UNPAIRED_LABELS = {"true": 1, "1": 1, "false": 0, "0": 0}


def joint_ids(tokenizer: Tokenizer, records: list[Record]) -> Iterator[Parts]:
    """Yield the ids of each prompt, and those that follow for each of its completions: the ids of
    both as one text, which are others than those of each alone where a token reaches over the
    border, or where the tokenizer puts a space before a text. The prompt ends where the ids of a
    joint text are no longer those of the prompt alone, as it is given to the model that continues
    it."""
    # One call for all texts, because a batch is encoded on all cores.
    prompts = tokenizer.encode_batch([str(prompt) for prompt, *_ in records])
    texts = [f"{prompt}{side}" for prompt, *sides in records for side in sides]
    encoded = iter(tokenizer.encode_batch(texts))
    for prompt, (_, *sides) in zip(prompts, records, strict=True):
        joint = [next(encoded) for _ in sides]
        border = min(common_length(prompt, ids) for ids in joint)
        yield joint[0][:border], *(ids[border:] for ids in joint)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of ids with which both begin."""
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in equal)


class AnswerTemplate(Template):
    """A template of texts that are learned in part. An example is its ids, and the places in them
    at which what is learned begins and ends, in turn.

    Where it does not fit, what comes before the first answer loses its start, but not the tokens
    `before` with which texts begin, and keeps at least half a row; and then the text loses its end.
    With the cut "end" it loses its end alone.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.before = tokenizer.as_prompt([])
        if self.cut == "prompt":
            self.cut_where = "at the start of the prompt, and then at the end"

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return np.maximum(lengths[:, :1] - 1, 0)

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, edges = parts
        return self.answered(ids, edges, len(ids) - edges[0] if len(edges) else 0)

    def answered(self, ids: np.ndarray, edges: np.ndarray, answer: int) -> NumpyBatch:
        """Return the arrays [at most T] of a text that is learned between `edges`, whose prompt
        leaves room for `answer` tokens."""
        if self.cut == "prompt" and len(edges):
            # The last token is a target alone, so that a row has length + 1 tokens.
            capacity = max(self.length + 1 - answer, (self.length + 1) // 2)
            lost = max(int(edges[0]) - capacity, 0)
            start = 0
            if ids[: len(self.before)].tolist() == self.before:
                start = len(self.before)
            ids = joined(ids[:start], ids[start + lost :])
            edges = edges - lost
        ids = ids[: self.length + 1]
        # A token is learned where an odd number of edges has been passed.
        learned = np.searchsorted(edges, np.arange(len(ids)), side="right") % 2
        return {"tokens": ids[:-1], "targets": ids[1:], "weights": learned[1:].astype(np.float32)}


class SFTTemplate(AnswerTemplate):
    """A prompt, its answer and the end token, of which only the answer and its end are learned."""

    recipe = (JOINT_IDS,)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        for prompt, answer in joint_ids(self.tokenizer, records):
            ids = [*self.before, *prompt, *answer, self.end]
            yield ids, (len(ids) - len(answer) - 1, len(ids))


class MessagesTemplate(AnswerTemplate):
    """A conversation in its chat template; only what the assistant wrote is learned, with the token
    that ends its turn."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.chat = ChatTemplate.of(tokenizer)
        self.recipe = (template_fingerprint(tokenizer),)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        marked = [marked_text(self.chat, record[0], index) for index, record in enumerate(records)]
        for ids, learned in self.chat.encode_marked(marked):
            steps = np.diff(np.array([0, *learned, 0], np.int8))
            yield ids, np.flatnonzero(steps).tolist()

    def warnings(self) -> list[str]:
        return self.chat.warnings()


class PreferenceTemplate(SidesTemplate, AnswerTemplate):
    """One pair a row, each array [2, T]: the prompt with the chosen completion and its end token,
    and the same prompt with the rejected one. Targets of a completion have the weight 1.

    Prompts and completions that are messages are in the chat template of the tokenizer, in which a
    completion ends with what ends a turn. Where the longer side does not fit, both lose the same
    tokens at the start of their prompt.
    """

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.recipe = (JOINT_IDS, template_fingerprint(tokenizer))

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        """Return the ids of each prompt and of both completions, with the tokens that begin and end
        a text; of messages those of the chat template alone."""
        texts = [record for record in records if isinstance(record[0], str)]
        written = joint_ids(self.tokenizer, texts)
        spoken = self._answers(records)
        for record in records:
            if not isinstance(record[0], str):
                yield next(spoken)
                continue
            prompt, *sides = next(written)
            yield [*self.before, *prompt], *([*side, self.end] for side in sides)

    def _answers(self, records: list[Record]) -> Iterator[Parts]:
        """Yield the parts of the records whose prompt is messages.

        A completion begins with the first token that is learned. Where a token holds characters of
        both the prompt and an answer, so that the prompts differ in it, it is part of the
        completions.
        """
        marked: list[Marked] = []
        for index, (prompt, *sides) in enumerate(records):
            if isinstance(prompt, str):
                continue
            for side in sides:
                text, spans = marked_text(self.chat, (*prompt, *side), index)
                marked.append((text, spans[-1:]))
            before = [text[: spans[0][0]] for text, spans in marked[-2:]]
            if before[0] != before[1]:
                raise RecordError(
                    "pairs whose prompts differ",
                    f"{self.chat.where} renders the prompt otherwise before the rejected answer:"
                    " set tokenizer.chat_template to one that does not.",
                    index,
                )
        encoded = self.chat.encode_marked(marked) if marked else []
        for pair in zip(encoded[::2], encoded[1::2], strict=True):
            chosen, rejected = (ids for ids, _ in pair)
            begin = min(len(chosen), len(rejected))
            ends = []
            for ids, learned in pair:
                places = np.flatnonzero(learned).tolist()
                end = len(ids)
                if places:
                    begin = min(begin, places[0])
                    end = places[-1] + 1
                ends.append(end)
            begin = common_length(chosen[:begin], rejected[:begin])
            yield chosen[:begin], chosen[begin : ends[0]], rejected[begin : ends[1]]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        # The last token is a target alone.
        return lengths[:, :1] + lengths[:, 1:] - 1

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, *completions = parts
        longest = max(map(len, completions))
        sides = []
        for completion in completions:
            ids = joined(prompt, completion)
            sides.append(self.answered(ids, np.array([len(prompt), len(ids)]), longest))
        return self.pair(sides)


class PromptTemplate(Template):
    """A prompt, a text or messages, to which the model writes answers, one a row; where it is
    longer than a source, it loses its start. "expected" is what rewards compare the answers with,
    if anything: its ids from 1, since 0 is padding."""

    packs = False
    cut_where = "at the start of the prompt, or the end of the target"

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.recipe = (template_fingerprint(tokenizer),)
        self.capacity = (row_format.source_length, self.length)
        self.lengths = dict.fromkeys(("tokens", "segment_ids"), row_format.source_length)

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        for prompt, *expected in records:
            if isinstance(prompt, str):
                ids = self.tokenizer.as_prompt(self.tokenizer.encode(prompt))
            else:
                ids = self.chat.encode_prompt([*map(json.loads, prompt)])
            yield ids, self.tokenizer.encode("".join(map(str, expected)))

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, expected = parts
        return {
            "tokens": prompt[-self.format.source_length :],
            "expected": expected[: self.length] + 1,
        }


class UnpairedTemplate(PreferenceTemplate):
    """A completion that is desirable or not, one a row, each array [2, T]: the prompt with the
    completion, and the same prompt with that of the next example, which does not belong to it.
    "desirable" is 1 or 0."""

    neighbors = True

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        # A pair whose sides are equal.
        pairs: list[Record] = [
            (prompt, completion, completion) for prompt, completion, _ in records
        ]
        for index, (prompt, completion, _) in enumerate(super().encode(pairs, labels)):
            label = records[index][-1]
            if str(label).lower() not in UNPAIRED_LABELS:
                raise RecordError(
                    "labels that are no truth value",
                    f"{label!r} has to be one of {', '.join(UNPAIRED_LABELS)}.",
                    index,
                )
            yield prompt, completion, [UNPAIRED_LABELS[str(label).lower()]]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return super().sizes(lengths[:, [0, 1, 1]])

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        prompt, completion, label = parts
        desirable = np.array(label[0], np.float32)
        return {"prompt": prompt, "completion": completion, "desirable": desirable}

    def row(self, examples: list[NumpyBatch]) -> NumpyBatch:
        example, after = examples
        sides = super().arrays(example["prompt"], example["completion"], after["completion"])
        return super().row([sides]) | {"desirable": example["desirable"]}


def marked_text(chat: ChatTemplate, messages: Value, index: int) -> Marked:
    """Return the text of a conversation, and the places in it of what is learned; `index` is that
    of its record."""
    try:
        return chat.marked([json.loads(message) for message in messages])
    except UnboundedTemplate:
        # No error policy skips it: each record would take as long.
        raise
    except ConfigError as error:
        reason = "conversations that the chat template refuses"
        raise RecordError(reason, f"{error}.", index) from None


class FramedTemplate(Template):
    """Texts in the tokenizer's template for one text or for two, which is a part of the data's
    fingerprint."""

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        start: list[int] = []
        stop = [self.end]
        # The tokenizer of a decoder may have these too, but they stand around no text of it.
        if row_format.marks:
            first = tokenizer.special("cls")
            if first is not None:
                start = [first]
            last = tokenizer.special("sep")
            if last is not None:
                stop = [last]
        # What stands around one text or two: the tokenizer's template, or [CLS] and [SEP] or the
        # end token where it has none.
        self.frames: dict[int, Frame] = {}
        for texts in (1, 2):
            self.frames[texts] = tokenizer.frame(texts) or closed(start, stop, texts)
        self.recipe = tuple(str(frame.slots) for frame in self.frames.values())

    def framed(self, *texts: Sequence[int] | np.ndarray) -> NumpyBatch:
        """Return the tokens of texts in their frame, and the types of the tokens where the model
        has any."""
        tokens, kinds = self.frames[len(texts)].fill(texts)
        row = {"tokens": tokens}
        if self.format.token_types:
            row["token_types"] = np.minimum(kinds, self.format.token_types - 1)
        return row


class ClassTemplate(FramedTemplate):
    """One text or two and their class, one example a row, in the tokenizer's template for one text
    or for two. Where it has none: [CLS] text [SEP] (text [SEP]) in an encoder whose tokenizer has
    these, else each text with the end token. Of two that are too long the longer is cut first
    (BERT, arXiv:1810.04805).
    """

    packs = False

    def __init__(self, row_format: RowFormat, tokenizer: Tokenizer) -> None:
        super().__init__(row_format, tokenizer)
        self.lengths |= {"targets": 1, "weights": 1}

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        texts = super().encode([record[:-1] for record in records], labels)
        for parts, record in zip(texts, records, strict=True):
            yield *parts, [labels.setdefault(str(record[-1]), len(labels))]

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :-1].sum(1, keepdims=True) + self.frames[lengths.shape[1] - 1].added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        *texts, label = parts
        capacity = self.length - self.frames[len(texts)].added
        if len(texts) == 2:
            # The first keeps what the second leaves, but at least half (rounded up).
            first = min(len(texts[0]), max(capacity - len(texts[1]), -(-capacity // 2)))
            texts = [texts[0][:first], texts[1][: capacity - first]]
        row = self.framed(*(text[:capacity] for text in texts))
        return row | {"targets": label, "weights": np.ones(1, np.float32)}


class TagTemplate(FramedTemplate):
    """Words and a tag for each, learned on the word's first piece, in the frame of one text as in
    `ClassTemplate`."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        words: list[str] = []
        for record in records:
            for position, word in enumerate(record[0]):
                # With the space before it, as the word is tokenized within a sentence.
                words.append(f" {word}" if position else word)
        pieces = iter(self.tokenizer.encode_batch(words))
        for _, tags in records:
            ids: list[int] = []
            numbers: list[int] = []
            for tag in tags:
                word_ids = next(pieces)
                ids += word_ids
                # The further pieces of a word, numbered -1, are not learned.
                of_word = [labels.setdefault(tag, len(labels)), *[-1] * len(word_ids)]
                numbers += of_word[: len(word_ids)]
            yield ids, numbers

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths[:, :1] + self.frames[1].added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        ids, tags = (sequence[: self.length - self.frames[1].added] for sequence in parts)
        slots = self.frames[1].slots
        text_slot = [slot.token for slot in slots].index(None)
        tags = np.pad(tags, (text_slot, len(slots) - text_slot - 1), constant_values=-1)
        return self.framed(ids) | {
            "targets": np.maximum(tags, 0),
            "weights": (tags >= 0).astype(np.float32),
        }


class ContrastiveTemplate(SidesTemplate, FramedTemplate):
    """An anchor, its positive and its N negatives, one example a row, each array [2 + N, T]: texts
    of their own, each in the frame of one text as in `ClassTemplate`, cut at the end and padded
    with zeros. A negative that a record has not is padding alone."""

    def encode(self, records: list[Record], labels: Labels) -> Iterable[Parts]:
        count = self.format.negatives
        padded: list[Record] = []
        for anchor, positive, *negatives in records:
            texts = [*itertools.chain(*negatives, [""] * count)]
            padded.append((anchor, positive, *texts[:count]))
        return super().encode(padded, labels)

    def sizes(self, lengths: np.ndarray) -> np.ndarray:
        return lengths + self.frames[1].added

    def arrays(self, *parts: np.ndarray) -> NumpyBatch:
        capacity = self.length - self.frames[1].added
        sides = [self.framed(ids[:capacity]) for ids in parts]
        for number, ids in enumerate(parts[2:], 2):
            if not len(ids):
                sides[number] = {name: array[:0] for name, array in sides[number].items()}
        return self.pair(sides)
