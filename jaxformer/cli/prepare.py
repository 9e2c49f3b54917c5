"""`jaxformer prepare CONFIG`: tokenizes a run's data beforehand."""

import dataclasses

from jaxformer.cli.arguments import PrepareArguments
from jaxformer.config.format import escaped
from jaxformer.config.run import RunConfig
from jaxformer.data.corpus import tokenize
from jaxformer.runs.init_from import with_vocabulary_of
from jaxformer.runs.model_files import ModelFiles
from jaxformer.runs.objectives import task_of, with_chats


def run(args: PrepareArguments, config: RunConfig) -> int:
    # Tokens that a run adds to the vocabulary of its base change the ids of its data.
    if config.tokenizer.added:
        base = ModelFiles(config.run.init_from)
        origin = base.or_begun(config.run)
        model, tokenizer, _ = with_vocabulary_of(base, origin, config.model, config.tokenizer)
        config = dataclasses.replace(config, model=model, tokenizer=tokenizer)

    def log(line: str) -> None:
        print(escaped(line), flush=True)

    data = with_chats(config.model, config.data, log=log)
    task = task_of(config.model, data)
    size = config.model.vocab_size
    tokenized = tokenize(data, config.tokenizer, task, vocab_size=size, log=log)
    # A text of which a part is held out is on both sides.
    texts = {split.source: store for parts in tokenized.parts.values() for split, store in parts}
    for source, store in texts.items() if tokenized.template is None else ():
        rate = store.bytes / max(1, store.tokens - store.documents)
        log(
            f"{source}: {store.documents:,} documents, {store.tokens:,} tokens, {rate:.3f} bytes"
            " per token"
        )
    return 0
