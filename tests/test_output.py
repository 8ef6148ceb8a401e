"""A user's file is written whole or stays as it was, whatever lies at its path."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ascend_lab import output
from ascend_lab.errors import InputError
from ascend_lab.output import write_whole


def names(folder):
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("step", ["fsync", "fdopen"])
@pytest.mark.parametrize("fault", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, fault):
    file = tmp_path / "a.json"
    file.write_text("old")

    def failing(*_):
        raise fault

    monkeypatch.setattr(os, step, failing)
    with pytest.raises((InputError, KeyboardInterrupt)):
        write_whole(file, "new")
    assert file.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_permissions_and_links_stay(tmp_path):
    file = tmp_path / "a"
    link = tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o640


def test_odd_places_are_refused_in_one_line(tmp_path, monkeypatch):
    sock = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    os.chdir(tmp_path)
    sock.bind("sock")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    before = names(tmp_path)
    odd = ["", "/", ".", "sock", "pipe", "loop", "n" * 300, "no/such/folder", "a\0b", "/dev/full"]
    for path in odd:
        with pytest.raises(InputError) as caught:
            write_whole(path, "x" * 10_000)
        assert "\n" not in str(caught.value)
    assert names(tmp_path) == before
    sock.close()


def test_only_files_refuses_pipes_devices_and_links(tmp_path):
    file = tmp_path / "a"
    link = tmp_path / "link"
    dangling = tmp_path / "dangling"
    file.write_text("old")
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for path in (link, dangling, tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="a regular file"):
            write_whole(path, "new", only_files=True)
    assert names(tmp_path) == before and file.read_text() == "old"
    assert link.is_symlink() and dangling.is_symlink() and not Path("/dev/null").is_file()


def test_devices_and_pipes_are_written_as_they_are(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    write_whole("/dev/null", b"text")
    assert os.read(reader, 10) == b"text" and not Path("/dev/null").is_file()
    os.close(reader)
    file = tmp_path / "out"
    code = "from ascend_lab.output import write_whole as w; print(1); w('/dev/stdout', '2\\n')"
    with file.open("w") as out:
        subprocess.run([sys.executable, "-c", f"{code}; print(3)"], stdout=out, check=True)
    assert file.read_text() == "1\n2\n3\n"


def test_what_killed_writers_left_is_removed_once_it_is_old(tmp_path):
    young = tmp_path / ".ascend_lab-1.tmp"
    old = tmp_path / ".ascend_lab-2.tmp"
    young.touch()
    old.touch()
    os.utime(old, (0, time.time() - 2 * output.STALE_AFTER_S))
    write_whole(tmp_path / "a", "text")
    assert names(tmp_path) == [".ascend_lab-1.tmp", "a"]
