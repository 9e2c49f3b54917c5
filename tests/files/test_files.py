"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from jaxformer.files import ConfigError, read_text, replacing, write_text
from jaxformer.files.stores import OnDisk


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "below" / "text.txt"
    write_text(path, "first")
    with pytest.raises(KeyError), replacing(path) as file:
        file.write(b"sec")
        raise KeyError
    assert path.read_text() == "first" and names(path.parent) == {"text.txt"}
    write_text(path, "second")
    assert path.read_text() == "second" and names(path.parent) == {"text.txt"}


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    for there in ("old.txt", "new.txt"):
        target, link = tmp_path / "elsewhere" / there, tmp_path / f"link to {there}"
        target.parent.mkdir(exist_ok=True)
        link.symlink_to(target)
        if there == "old.txt":
            target.write_text("old")
        write_text(link, "text")
        assert link.is_symlink() and target.read_text() == "text" and not target.is_symlink()
    assert names(tmp_path / "elsewhere") == {"old.txt", "new.txt"}


@pytest.mark.parametrize("leads_to", ["a file", "itself"])
def test_without_following_a_link_is_replaced_and_what_it_leads_to_stays(
    leads_to: str, tmp_path: Path
) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(link if leads_to == "itself" else target)
    with pytest.warns(UserWarning, match="link was a link. It is a file now"):
        write_text(link, "text", follow=False)
    assert link.read_text() == "text" and not link.is_symlink()
    assert target.read_text() == "old"


def test_a_link_is_not_appended_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        OnDisk(tmp_path / "link").append()
    assert names(tmp_path) == {"link"}
    for text in (b"first ", b"second"):
        with OnDisk(tmp_path / "file").append() as file:
            file.write(text)
    assert (tmp_path / "file").read_text() == "first second"


PLACES = {  # what stands at a path, what writing it says, and what reading it says
    "a directory": ("a directory and not a file: make room", "a directory and not a file: fetch"),
    "a pipe": ("a device, a pipe or a socket", "a device, a pipe or a socket"),
    "a link to a pipe": ("a device, a pipe or a socket", "a device, a pipe or a socket"),
    "a link to itself": ("a link that leads to itself", "does not exist: fetch"),
    "a long name": (r"cannot be written \(.*\): make room", r"cannot be read \(.*\): fetch"),
    "not UTF-8": ("", "is not UTF-8 .*: fetch"),
    "nothing": ("", "does not exist: fetch"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_place_that_cannot_be_written_or_read_is_one_message(kind: str, tmp_path: Path) -> None:
    path = tmp_path / ("n" * 300 if kind == "a long name" else "place")
    if kind == "a directory":
        path.mkdir()
    elif kind == "a link to itself":
        path.symlink_to(path)
    elif kind == "not UTF-8":
        path.write_bytes(b"a\xff")
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    before = names(tmp_path)
    written, read = PLACES[kind]
    with pytest.raises(ConfigError, match=read):
        read_text(path, "fetch it again")
    if written:
        with pytest.raises(ConfigError, match=written):
            write_text(path, "text")
    assert names(tmp_path) == before
