"""The run directory: where its files are, and that it belongs to one config and one text, and to
one process at a time."""

import contextlib
import json
import reprlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoints.buckets import require_savable
from jaxformer.config.run import RunConfig, from_json
from jaxformer.config.settings import VOLATILE, flat, names_marked
from jaxformer.files import (
    ConfigError,
    first_of,
    lexists,
    located,
    read_object,
    read_text,
    store_of,
    write_text,
)
from jaxformer.report import read_metrics
from jaxformer.report.metrics import FILE
from jaxformer.tokenizer import Tokenizer
from jaxformer.tokenizer.metadata import TOKENIZER_FILES

# The entries of data.json that are names or places.
RECORD_KINDS = {"labels": list, "learned": list, "base": str, "base_path": str}
SIZES_OF_DATA = ("model.vocab_size", "model.head.n_classes")
DIRECTORIES = ("checkpoints", "profile", "tensorboard", "wandb")  # in a run directory
# What a run writes into its directory.
FILES_OF_A_RUN = (
    "config.json",
    "data.json",
    *TOKENIZER_FILES,
    FILE,
    f"{FILE}.parts",
    "rollbacks.json",
    "reference.json",
    "loss.png",
    *DIRECTORIES,
)


class OtherData(ConfigError):
    """The text, the tokenizer or the reference of a run is not the one that it was begun with."""


class RunDirectory:
    """The directory of a run, on a disk or in a bucket, and the paths of its files."""

    def __init__(self, path: str | Path) -> None:
        if not str(path):
            raise ConfigError(
                "run.dir is empty: name the directory of the run, for example runs/mine."
            )
        self.path = located(path)
        self.config = self.path / "config.json"
        self.data = self.path / "data.json"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / FILE
        self.rollbacks = self.path / "rollbacks.json"
        self.reference = self.path / "reference.json"
        self.checkpoints = self.path / "checkpoints"
        self.profile = self.path / "profile"

    def __str__(self) -> str:
        return str(self.path)

    def read_run(self) -> RunConfig:
        """The settings in config.json."""
        return from_json(read_text(self.config), str(self.config))

    def record(self) -> dict[str, Any]:
        """What data.json holds; nothing where there is none. Raises ConfigError where its names or
        places are none."""
        if not self.data.exists():
            return {}
        record = read_object(self.data)
        # The directory may come from somebody else, and what is read here becomes names and paths.
        for key, kind in RECORD_KINDS.items():
            value = record.get(key, kind())
            # No path has a NUL. The characters of a text are texts, as the names of a list.
            is_right = isinstance(value, kind) and "\0" not in value
            if not is_right or not all(isinstance(text, str) for text in value):
                allowed = {str: "a text", list: "a list of names"}[kind]
                raise ConfigError(
                    f"{self.data}: {key}={reprlib.repr(value)[:80]} must be {allowed}: restore the"
                    " file."
                )
        return record

    def is_in_use(self) -> bool:
        """Whether a process trains here."""
        return store_of(self.path).is_locked()

    @contextlib.contextmanager
    def lock(self, restart: bool) -> Iterator[None]:
        """Creates the directory where it is missing, and locks it while the context lasts; with
        `restart` what it holds is moved away. One that is still empty afterwards is removed.

        Of several processes of one run, the first one locks it for all.
        """
        if jax.process_index():
            # A second lock would be refused. Where the first process gets none, `together` raises
            # its error in the others.
            # What the first process moves away is no business of the others.
            if not restart:
                self.require_no_links()
            yield
            return
        # Checkpoints need more of a store than locks and metrics do: said before anything begins.
        require_savable(self.path.absolute())
        with store_of(self.path).locked(f"run.dir={str(self)!r}"):
            if restart:
                self.move_away()
            self.require_no_links()
            # A run whose checkpoints were removed or moved would begin at step 0 without a word,
            # and `MetricsLog` would remove all lines of the former one.
            if self.metrics.is_file() and not any(self.path.glob("checkpoints/*")):
                self.require_checkpoints()
            yield

    def require_no_links(self) -> None:
        """Raises ConfigError where a run would write through a link to a directory.

        Links at the names of files are replaced when these are written. `wandb/` holds links of its
        own, and its entries are left to that package.
        """
        places = [self.path / name for name in DIRECTORIES]
        places += [*self.checkpoints.glob("*"), *self.profile.rglob("*")]
        links = [str(path) for path in places if path.is_symlink()]
        if links:
            raise ConfigError(
                f"{first_of(links, 5, ', ')}: a link in a run directory, through which nothing is"
                " written; nothing was changed. Put the directory itself there, or choose another"
                " run.dir. To keep a run on another disk, name a directory there as run.dir."
            )

    def check_config(self, run: RunConfig) -> None:
        """Raises ConfigError, naming the fields, if the directory was begun with another config,
        and does not begin anew."""
        if run.run.restart or not self.config.is_file():
            return
        changed = list[str]()
        written = flat(self.read_run())
        now = flat(run)
        # A volatile setting does not change the numbers of a run.
        volatile = names_marked(RunConfig, VOLATILE)
        for name, before in written.items():
            after = now[name]
            if name in SIZES_OF_DATA and after == 0:
                # The data, which is not read yet, says it.
                continue
            may_change = name in volatile
            if name == "train.spike_factor":
                # Its value may change, but not whether the optimizer keeps a window of losses.
                may_change = bool(before) == bool(after)
            if before != after and not may_change:
                changed.append(f"{name}: {before!r} in the directory, {after!r} now")
        if changed:
            fields = "\n  ".join(changed)
            raise ConfigError(
                f"run.dir={str(self)!r} belongs to another config; nothing was changed. These"
                f" fields differ:\n  {fields}\nChoose another run.dir, or restore these settings."
            )

    def check_data(
        self, fingerprints: Mapping[str, str], labels: tuple[str, ...], base: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What data.json holds: the fingerprints of tokenizer and text, and the id of the run,
        which is drawn when the run is begun.

        `fingerprints` are those of the tokenizer and of each split; `labels` are the names of its
        classes, if any; `base` is the record of the model below an adapter, which was compared
        before.
        Raises OtherData if the text or the tokenizer has changed since the run was begun.
        """
        now: dict[str, Any] = {**fingerprints}
        if labels:
            now["labels"] = list(labels)
        before = now
        if self.data.exists():
            before = self.record()
        # A run keeps its id, by which its checkpoints are told from those of another one.
        run_entries = {"run_id": before.get("run_id") or uuid.uuid4().hex}
        for name, value in base.items():
            run_entries[name] = before.get(name, value)
        changed = list[str]()
        for name in {**before, **now}:
            if before.get(name) != now.get(name) and name not in run_entries:
                changed.append(name)
        if changed:
            raise OtherData(
                f"run.dir={str(self)!r} was begun with other text ({', '.join(changed)} changed),"
                " so it cannot be continued exactly; nothing was changed. Restore the text, or"
                " choose another run.dir."
            )
        return now | run_entries

    def claim(self, config: str, tokenizer: Tokenizer, record: dict[str, Any]) -> None:
        """Writes config.json, with the text `config`, tokenizer.json and data.json, which holds
        `record`, from `check_data`. The directory belongs to the run from here on."""
        if jax.process_index():
            return
        # config.json makes the directory one of a run (`ModelFiles.kind`, `or_begun`), so the
        # tokenizer is there before it. After a kill in between the next command would otherwise
        # look for a tokenizer that is not there.
        tokenizer.save(self.tokenizer, follow=False)
        write_text(self.config, config, follow=False)
        # A directory that was begun has this file already. Where the first claim ends before it, no
        # step was made, and `check_data` takes the text as it is at the next start.
        write_text(self.data, json.dumps(record, indent=2) + "\n", follow=False)

    def release(self) -> None:
        """Takes back what `claim` wrote, so that the directory may be begun with another config.
        Only for the command that claimed it, before there is a checkpoint."""
        if jax.process_index():
            return
        for name in ("config.json", "data.json", "reference.json", *TOKENIZER_FILES):
            (self.path / name).unlink(missing_ok=True)

    def move_away(self) -> None:
        """Moves what a run has written into a directory there, `before-1` or the next free number.
        Nothing is removed, and a link is moved itself."""
        folder = self.path
        # By name, and not all there is: the lock has to stay where it is, or another process could
        # lock the directory too, and earlier moves stay as well.
        paths = [folder / name for name in FILES_OF_A_RUN if lexists(folder / name)]
        number = 1
        while lexists(folder / f"before-{number}"):
            number += 1
        if paths:
            store_of(folder / f"before-{number}").gather(paths)

    def require_checkpoints(self) -> None:
        """Raises ConfigError where metrics.jsonl shows steps after which there must have been a
        checkpoint; for a directory without one.

        A run that was killed before its first save was complete needs none, and begins anew.
        """
        steps = [line["step"] for line in read_metrics(self.path) if line.get("step", 0) > 0]
        saved = self.checkpoints
        if not steps:
            return
        if store_of(saved).lacks_folder():
            state = "is not a directory" if saved.exists() else "is missing"
        else:
            if not self.config.is_file():
                return
            train = self.read_run().train
            complete = train.steps
            if train.checkpoint_every:
                # The second save waits for the first one.
                complete = min(2 * train.checkpoint_every + 1, train.steps)
            if max(steps) < complete:
                return
            state = "is empty"
        raise ConfigError(
            f"run.dir={str(self)!r} has metrics up to step {max(steps)}, and {saved} {state};"
            " nothing was changed. Put the checkpoints back, or begin anew with --run.restart True,"
            " which keeps what is there under another name."
        )


def identity_of(record: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """What never changes of a run: what data.json holds of its data, its id and its seed."""
    entries = dict(record)
    # These may change, or follow from what may not.
    for name in ("labels", "base_path"):
        entries.pop(name, None)
    return entries | {"seed": seed}
