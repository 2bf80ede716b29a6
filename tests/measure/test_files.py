"""A results file is replaced in one step, so a write that fails leaves the old file."""

import resource

import pytest

from common.measure import files


def test_file_is_new_replaced_or_reached_through_a_link(tmp_path):
    path, link = tmp_path / "run.json", tmp_path / "link.json"
    link.symlink_to(path)
    for target, text in ((path, "first"), (path, "second"), (link, "third")):
        files.replace(target, text)
        assert path.read_text() == text
    assert link.is_symlink() and sorted(tmp_path.iterdir()) == [link, path]


def test_write_that_fails_half_way_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("good")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # like a full disk
    try:
        with pytest.raises(OSError):
            files.replace(path, 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "good" and list(tmp_path.iterdir()) == [path]
