"""Files that appear whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from jaxformer.files import ConfigError, append_to, read_text, replacing, write_text


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


@pytest.mark.parametrize("leads_to", ["a file", "nothing", "a directory", "itself"])
def test_without_following_a_link_is_replaced_and_what_it_leads_to_stays(
    leads_to: str, tmp_path: Path
) -> None:
    target, link = tmp_path / "elsewhere", tmp_path / "link"
    if leads_to == "a file":
        target.write_text("old")
    elif leads_to == "a directory":
        target.mkdir()
    link.symlink_to(link if leads_to == "itself" else target)
    with pytest.warns(UserWarning, match="link was a link. It is a file now"):
        write_text(link, "text", follow=False)
    assert link.read_text() == "text" and not link.is_symlink()
    assert target.exists() == (leads_to in ("a file", "a directory"))
    assert leads_to != "a file" or target.read_text() == "old"


def test_a_link_is_not_appended_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        append_to(tmp_path / "link")
    assert names(tmp_path) == {"link"}
    for text in (b"first ", b"second"):
        with append_to(tmp_path / "file") as file:
            file.write(text)
    assert (tmp_path / "file").read_text() == "first second"


@pytest.mark.parametrize("kind", ["directory", "pipe", "link to a pipe"])
def test_what_is_no_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before, mode = names(tmp_path), path.stat().st_mode
    said = "a directory" if kind == "directory" else "a device, a pipe or a socket"
    with (
        pytest.raises(ConfigError, match=rf"place is {said} and not a file: choose another"),
        replacing(path, "choose another --output") as file,
    ):
        file.write(b"text")
    assert names(tmp_path) == before and stat.S_IFMT(path.stat().st_mode) == stat.S_IFMT(mode)


@pytest.mark.parametrize(
    ("name", "said"),
    [("n" * 300, r"cannot be written \(.*\): make room"), ("loop", "a link that leads to itself")],
    ids=["long", "loop"],
)
def test_a_place_that_cannot_be_is_one_message(name: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "loop":
        path.symlink_to(path)
    with pytest.raises(ConfigError, match=said):
        write_text(path, "text")
    assert names(tmp_path) <= {"loop"}


@pytest.mark.parametrize("kind", ["pipe", "directory", "nothing", "not UTF-8", "a name with NUL"])
def test_what_cannot_be_read_is_one_message(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "not UTF-8":
        path.write_bytes(b"a\xff")
    elif kind == "a name with NUL":
        path = tmp_path / "a\0b"
    with pytest.raises(ConfigError, match=r"(?s)(is|does not|cannot be) .*: fetch it again\."):
        read_text(path, "fetch it again")
